import { startKeys } from "./keys.js";
import { startLive } from "./live.js";
import { startSelection } from "./select.js";

const themes = ["system", "light", "dark"];

function theme() {
  return document.documentElement.dataset.theme ?? "system";
}

function showTheme() {
  document.getElementById("theme").textContent = `Theme: ${theme()}`;
}

export function nextTheme() {
  const next = themes[(themes.indexOf(theme()) + 1) % themes.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    if (next === "system") localStorage.removeItem("pgqueue-theme");
    else localStorage.setItem("pgqueue-theme", next);
  } catch {
    // It holds for this page alone.
  }
  showTheme();
}

function startConfirm() {
  const dialog = document.getElementById("confirm");
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!form.dataset.confirm || form.dataset.confirmed) return;
    event.preventDefault();
    document.getElementById("confirm-text").textContent = form.dataset.confirm;
    dialog.returnValue = "no";
    dialog.addEventListener(
      "close",
      () => {
        if (dialog.returnValue !== "yes") return;
        form.dataset.confirmed = "1";
        form.requestSubmit();
      },
      { once: true },
    );
    dialog.showModal();
  });
}

function startCopy() {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    try {
      await navigator.clipboard.writeText(button.parentElement.querySelector("pre").textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}

showTheme();
document.getElementById("theme").addEventListener("click", nextTheme);
document.getElementById("help-button").addEventListener("click", () => document.getElementById("help").showModal());
startConfirm();
startCopy();
const selection = startSelection();
const live = startLive(() => selection.show());
startKeys({ live, nextTheme, selection });
