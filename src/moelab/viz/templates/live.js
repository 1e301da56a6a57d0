export default {
  render({ model, el }) {
    Object.assign(el.style, { display: "flex", flexFlow: "row wrap", gap: "2px 8px" });
    const places = {};
    let plotly;
    const draw = async () => {
      if (!plotly) {
        const loaded = { exports: {} };
        new Function("module", model.get("plotly"))(loaded);
        plotly = loaded.exports;
      }
      for (const [name, { data, layout }] of Object.entries(model.get("figures"))) {
        places[name] ??= el.appendChild(document.createElement("div"));
        await plotly.react(places[name], data, layout, { displaylogo: false });
      }
    };
    let drawn = draw();
    const again = () => { drawn = drawn.catch(console.error).then(draw); };
    model.on("change:figures", again);
    return () => {
      model.off("change:figures", again);
      Object.values(places).forEach((place) => plotly?.purge(place));
    };
  }
};
