// Before anything is drawn, so that no page flashes in the wrong colours.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("pgqueue-theme");
  } catch {
    // No storage: as the system has it.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
