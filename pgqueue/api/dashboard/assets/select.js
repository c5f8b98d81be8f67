// Ticked rows and what the bar above them says.

export function startSelection() {
  function boxes() {
    return [...document.querySelectorAll('input[type=checkbox][name="id"]')];
  }

  function show() {
    const all = document.getElementById("all-rows");
    if (!all) return;
    const every = boxes();
    const ticked = every.filter((box) => box.checked);
    all.checked = every.length > 0 && ticked.length === every.length;
    all.indeterminate = ticked.length > 0 && !all.checked;
    const text = ticked.length ? `${ticked.length} selected` : "Select this page";
    const shown = document.getElementById("selected-count");
    if (shown.textContent !== text) shown.textContent = text;
    for (const box of every) box.closest("tr, li")?.classList.toggle("ticked", box.checked);
    const none = !ticked.length && document.querySelector("#bulk [name=target]").value === "selected";
    for (const button of document.querySelectorAll("#bulk button")) button.disabled = none;
  }

  function tickAll(checked) {
    for (const box of boxes()) box.checked = checked;
    show();
  }

  document.addEventListener("change", (event) => {
    if (event.target.id === "all-rows") tickAll(event.target.checked);
    else if (event.target.name === "id" || event.target.name === "target") show();
  });
  // Browsers put ticks back after scripts have begun.
  addEventListener("pageshow", show);
  show();
  return { show, tickAll, any: () => boxes().some((box) => box.checked), all: () => boxes().every((box) => box.checked) };
}
