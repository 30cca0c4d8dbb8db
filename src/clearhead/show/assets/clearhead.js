// The opacity of a heat map follows its slider; what is folded away is opened for printing.
(() => {
  if (window.clearheadShow) return;
  window.clearheadShow = true;
  document.addEventListener("input", (event) => {
    if (event.target.matches(".clearhead .ch-opacity")) {
      event.target.closest("figure").style.setProperty("--o", event.target.value / 100);
    }
  });
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll(".clearhead details:not([open])")];
    opened.forEach((part) => { part.open = true; });
  });
  window.addEventListener("afterprint", () => opened.forEach((part) => { part.open = false; }));
})();
