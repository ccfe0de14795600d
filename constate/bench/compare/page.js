// Draws the charts in the page's own colours, anew where those change, and lets series be hidden in all at once.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  let views = [];

  function theme() {
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const font = getComputedStyle(document.body).fontFamily;
    return {
      background: null,
      font,
      view: { stroke: null },
      legend: { disable: true, labelColor: colour("--soft"), labelFontSize: 11 },
      axis: {
        labelColor: colour("--soft"),
        titleColor: colour("--soft"),
        titleFontWeight: "normal",
        titlePadding: 10,
        labelFontSize: 11,
        titleFontSize: 12,
        gridColor: colour("--line"),
        domainColor: colour("--line"),
        tickColor: colour("--line"),
      },
    };
  }

  async function draw() {
    document.body.dataset.drawn = "";
    views.forEach((view) => view.finalize());
    const options = {
      actions: false,
      renderer: "svg",
      defaultStyle: false,
      config: theme(),
      tooltip: { theme: dark.matches ? "dark" : "light" },
    };
    const made = Object.entries(charts).map(([id, spec]) => vegaEmbed(`#${id}`, spec, options));
    views = (await Promise.all(made)).map((result) => result.view);
    await tell();
    document.body.dataset.drawn = String(views.length);
  }

  function tell() {
    return Promise.all(views.map((view) => view.signal("hidden", [...hidden]).runAsync()));
  }

  for (const button of document.querySelectorAll("[data-series]")) {
    button.addEventListener("click", () => {
      const name = button.dataset.series;
      const shows = hidden.delete(name);
      if (!shows) hidden.add(name);
      button.setAttribute("aria-pressed", String(shows));
      tell();
    });
  }
  dark.addEventListener("change", draw);
  draw();
})();
