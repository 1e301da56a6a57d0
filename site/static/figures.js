// Figures and explorers of the site. plotly.js and each explorer's figures are loaded when they come into sight, by
// script elements: a browser refuses fetch() to a page that is read from a folder.
(() => {
  const base = new URL(".", document.currentScript.src);
  const loading = new Map();
  const load = (name) => {
    if (!loading.has(name))
      loading.set(name, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        Object.assign(script, { src: new URL(name, base), onload: resolve, onerror: () => reject(new Error(`no ${name}`)) });
        document.head.append(script);
      }));
    return loading.get(name);
  };
  const grids = (window.moelabGrids = {});

  const isDark = () => document.documentElement.dataset.theme === "dark";
  const drawn = new Map(); // figures by their boxes, to be drawn again in the other theme

  const draw = async (box, figure) => {
    drawn.set(box, figure);
    await load("plotly.min.js");
    const { caption, data, layout } = isDark() ? painted(figure, moelabDark) : figure;
    box.querySelector("figcaption").innerHTML = caption;
    const plot = box.querySelector(".plot");
    plot.style.height = `${layout.height}px`;
    // plotly writes ranges and sizes into the layout that it is given.
    await Plotly.react(plot, [...data], structuredClone(layout), { responsive: true, displaylogo: false });
  };
  new MutationObserver(() => drawn.forEach((figure, box) => draw(box, figure))).observe(document.documentElement, {
    attributeFilter: ["data-theme"],
  });

  const unpack = async (packed) => {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  };

  const explore = async (box) => {
    await load(`grids/${box.dataset.grid}.js`);
    const { states, figures } = grids[box.dataset.grid];
    const controls = [...box.querySelectorAll("input, select")];
    let turn = 0;
    const show = async () => {
      const mine = ++turn;
      for (const one of controls)
        if (one.type === "range") {
          const words = one.dataset.labels.split("|")[one.value];
          one.nextElementSibling.value = words;
          one.setAttribute("aria-valuetext", words);
        }
      const state = states[controls.map((one) => one.value).join()];
      box.querySelector(".words").innerHTML = state.words;
      const figure = box.querySelector("figure");
      figure.hidden = state.figure === undefined;
      if (figure.hidden || figure.dataset.shown === String(state.figure)) return;
      const unpacked = await unpack(figures[state.figure]);
      if (mine !== turn) return; // a control moved on meanwhile
      figure.dataset.shown = state.figure;
      await draw(figure, unpacked);
    };
    for (const one of controls) one.addEventListener("input", show);
    await show();
  };

  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries.filter((entry) => entry.isIntersecting)) {
      seen.unobserve(target);
      if (target.dataset.grid) explore(target);
      else draw(target, JSON.parse(target.querySelector("script").textContent));
    }
  }, { rootMargin: "600px" });
  document.querySelectorAll(".moelab-explorer, figure.moelab-figure:not(.moelab-explorer *)").forEach((one) => seen.observe(one));
})();
