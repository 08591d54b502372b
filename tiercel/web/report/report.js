"use strict";

function enliven(root) {
  for (const figure of root.querySelectorAll("figure[data-chart]")) drawChart(figure);

  for (const row of root.querySelectorAll("tr[data-box]")) {
    const boxes = row.closest(".card").querySelectorAll("g[data-box]");
    const light = (on) => {
      row.classList.toggle("lit", on);
      for (const box of boxes) box.classList.toggle("dimmed", on && box.dataset.box !== row.dataset.box);
    };
    row.addEventListener("pointerenter", () => light(true));
    row.addEventListener("pointerleave", () => light(false));
  }
}

enliven(document);

window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details.step")) details.open = true;
});
