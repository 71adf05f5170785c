"use strict";
// The page reads without this: it adds a readout on charts, the filter of episodes, and the choice of colours.
(() => {
  const readout = document.getElementById("readout");

  const shown = (value, percent) => {
    if (value === null) return "-";
    return percent ? `${(100 * value).toPrecision(3)} %` : String(value);
  };

  const lines = (data, index) =>
    data.series.map((line) => `${line.name}: ${shown(line.y[index], data.percent)}`);

  for (const figure of document.querySelectorAll(".chart")) {
    const data = JSON.parse(figure.dataset.chart);
    const svg = figure.querySelector("svg");
    const cross = svg.querySelector(".cross");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const share = ((event.clientX - box.left) / box.width - data.left) / (data.right - data.left);
      const first = data.x[0];
      const span = data.x[data.x.length - 1] - first || 1;
      const wanted = first + share * span;
      let index = 0;
      data.x.forEach((x, i) => {
        if (Math.abs(x - wanted) < Math.abs(data.x[index] - wanted)) index = i;
      });
      const place = data.left + ((data.x[index] - first) / span) * (data.right - data.left);
      const at = place * svg.viewBox.baseVal.width;
      cross.setAttribute("x1", at);
      cross.setAttribute("x2", at);
      cross.style.visibility = "visible";
      readout.replaceChildren();
      for (const text of [`iteration ${data.x[index]}`, ...lines(data, index)]) {
        const row = document.createElement("div");
        row.textContent = text;
        readout.append(row);
      }
      readout.hidden = false;
      const left = Math.min(event.pageX + 14, window.scrollX + document.documentElement.clientWidth - readout.offsetWidth - 8);
      readout.style.left = `${left}px`;
      readout.style.top = `${event.pageY + 14}px`;
    });
    svg.addEventListener("pointerleave", () => {
      readout.hidden = true;
      cross.style.visibility = "hidden";
    });
  }

  const filters = document.querySelectorAll("[data-show]");
  for (const button of filters) {
    button.addEventListener("click", () => {
      const kind = button.dataset.show;
      for (const other of filters) other.setAttribute("aria-pressed", String(other === button));
      for (const episode of document.querySelectorAll(".episode")) {
        episode.hidden = kind !== "all" && episode.dataset.outcome !== kind;
      }
    });
  }

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const now = root.dataset.theme || (window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });
})();
