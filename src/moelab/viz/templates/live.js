// Figures of a widget: drawn by plotly.js in place, in the colours of JupyterLab's theme.
const put = (figures, [path, value]) => {
  const last = path.at(-1);
  path.slice(0, -1).reduce((place, key) => place[key], figures)[last] = value;
};
const isDark = () => document.body.dataset.jpThemeLight === "false";

export default {
  // For each model and not for each view: a change that comes while no view is in the page must not be lost.
  initialize({ model }) {
    model.on("msg:custom", ({ changes, number }) => {
      changes.forEach((change) => put(model.get("figures"), change));
      model.set("drawn", number);
    });
    model.send({ drawn: model.get("drawn") });
  },
  render({ model, el }) {
    Object.assign(el.style, { display: "flex", flexFlow: "row wrap", gap: "2px 8px", minWidth: 0 });
    const places = {};
    let due = false, busy = false;
    const drawOne = async (name, figure) => {
      const place = (places[name] ??= el.appendChild(document.createElement("div")));
      place.style.visibility = figure ? "" : "hidden"; // it keeps its room, so that the page does not jump
      if (!figure) return;
      if (!figure.layout.width) Object.assign(place.style, { flex: "1 1 100%", minWidth: 0 });
      // plotly writes ranges and sizes into the layout that it is given.
      const { data, layout } = isDark() ? painted(figure, model.get("dark")) : figure;
      await globalThis.moelabPlotly.react(place, [...data], structuredClone(layout), { displaylogo: false });
    };
    const draw = async () => {
      due = true;
      if (busy) return; // what comes while it draws is drawn once, at the end
      busy = true;
      if (!globalThis.moelabPlotly) {
        const loaded = { exports: {} };
        new Function("module", model.get("plotly"))(loaded);
        globalThis.moelabPlotly = loaded.exports;
      }
      while (due) {
        due = false;
        for (const [name, figure] of Object.entries(model.get("figures")))
          await drawOne(name, figure).catch(console.error);
      }
      busy = false;
    };
    const shown = () => Object.values(places).filter((place) => place.querySelector(".main-svg") && place.offsetWidth);
    let width = 0; // of the last resize: a figure that becomes taller is no reason for another
    const resized = new ResizeObserver(() => {
      if (width !== (width = el.clientWidth)) shown().forEach((place) => globalThis.moelabPlotly.Plots.resize(place));
    });
    const themed = new MutationObserver(draw), changes = ["change:figures", "change:drawn"];
    changes.forEach((change) => model.on(change, draw));
    themed.observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
    resized.observe(el);
    draw();
    return () => {
      changes.forEach((change) => model.off(change, draw));
      themed.disconnect();
      resized.disconnect();
      shown().forEach((place) => globalThis.moelabPlotly.purge(place));
    };
  }
};
