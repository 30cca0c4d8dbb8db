// The opacity of a heat map follows its slider; a step that is pointed at is shown alone, one that is chosen stays;
// what is folded away is opened for printing.
(() => {
  if (window.clearheadShow) return;
  window.clearheadShow = true;
  document.addEventListener("input", (event) => {
    if (event.target.matches(".clearhead .ch-opacity")) {
      event.target.closest("figure").style.setProperty("--o", event.target.value / 100);
    }
  });

  const LEVEL = /\bch(-?\d+|n)\b/;
  // A unit takes the colour and the words of its cell in the table; without a cell, its own again.
  const dress = (unit, cell) => {
    unit.dataset.level ??= unit.className.match(LEVEL)[0];
    unit.dataset.said ??= unit.title;
    unit.className = unit.className.replace(LEVEL, cell ? cell.className.match(LEVEL)[0] : unit.dataset.level);
    unit.title = cell ? cell.title : unit.dataset.said;
  };
  const show = (card, step) => {
    card.classList.toggle("ch-stepped", step !== undefined);
    for (const part of card.querySelectorAll("[data-step]")) part.classList.toggle("ch-on", part.dataset.step === step);
    for (const stream of card.querySelectorAll(".ch-stream")) {
      const row = stream.querySelector("tr.ch-on"), map = stream.querySelector("figure.ch-on img");
      const units = stream.querySelectorAll(".ch-u, .ch-region"), heat = stream.querySelector(".ch-views .ch-heat");
      const cells = row && row.cells.length === units.length + 1 ? [...row.cells].slice(1) : [];
      units.forEach((unit, place) => dress(unit, cells[place]));
      if (heat) {
        heat.dataset.all ??= heat.src;
        heat.src = map ? map.src : heat.dataset.all;
      }
    }
  };
  const stepAt = (event) => event.target.closest?.(".clearhead .ch-card [data-step]:not(.ch-box)");
  document.addEventListener("pointerover", (event) => {
    const step = stepAt(event);
    if (step) show(step.closest(".ch-card"), step.dataset.step);
  });
  document.addEventListener("pointerout", (event) => {
    const card = stepAt(event)?.closest(".ch-card");
    if (card) show(card, card.dataset.kept);
  });
  document.addEventListener("click", (event) => {
    const step = stepAt(event), card = step?.closest(".ch-card");
    if (!card) return;
    if (card.dataset.kept === step.dataset.step) delete card.dataset.kept;
    else card.dataset.kept = step.dataset.step;
    for (const chip of card.querySelectorAll(".ch-chip")) {
      chip.setAttribute("aria-pressed", chip.dataset.step === card.dataset.kept);
    }
    show(card, card.dataset.kept);
  });

  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll(".clearhead details:not([open])")];
    opened.forEach((part) => { part.open = true; });
  });
  window.addEventListener("afterprint", () => opened.forEach((part) => { part.open = false; }));
})();
