// g and a letter for pages, j and k for rows, the rest as the help says.

export function startKeys({ live, nextTheme, selection }) {
  let going = 0;

  function rows() {
    return [...document.querySelectorAll("[data-rows] tbody > tr, ul[data-rows] > li, div[data-rows] > article")];
  }

  function move(step) {
    const all = rows();
    if (!all.length) return;
    const at = all.findIndex((row) => row.classList.contains("here"));
    const next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step))];
    for (const row of all) row.classList.toggle("here", row === next);
    next.scrollIntoView({ block: "nearest" });
  }

  const row = () => document.querySelector("#live .here");

  function act(key) {
    const one = (row() ?? document.querySelector(".head"))?.querySelector(`[data-key="${key}"]`);
    const many = document.querySelector(`[data-bulk-key="${key}"]`);
    if (selection.any() && many) many.click();
    else if (one) one.click();
    else if (many && row()) {
      const box = row().querySelector("input[name=id]");
      if (box) box.checked = true;
      selection.show();
      many.click();
    }
  }

  const keys = {
    "/": () => {
      const search = document.querySelector("[data-search]");
      if (search) search.focus();
      else location.assign(`${document.body.dataset.base}/jobs`);
    },
    j: () => move(1),
    k: () => move(-1),
    x: () => {
      row()?.querySelector("input[name=id]")?.click();
    },
    A: () => selection.tickAll(!selection.all()),
    R: () => act("R"),
    C: () => act("C"),
    D: () => act("D"),
    r: () => live.refresh(),
    p: () => live.toggle(),
    t: () => nextTheme(),
    "?": () => document.getElementById("help").showModal(),
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.matches("input:not([type=checkbox]), select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.key === "Enter" && !event.target.closest("a, button, summary, input")) {
      row()?.querySelector("[data-open]")?.click();
      return;
    }
    if (performance.now() - going < 1500 && going) {
      going = 0;
      const link = [...document.querySelectorAll("[data-go]")].find((one) => one.dataset.go === event.key);
      if (link) {
        event.preventDefault();
        link.click();
        return;
      }
    }
    if (event.key === "g") {
      going = performance.now();
      return;
    }
    const found = Object.hasOwn(keys, event.key) ? keys[event.key] : null;
    if (found) {
      event.preventDefault();
      found();
    }
  });
}
