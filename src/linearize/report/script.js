// The page works without this: the theme is then the system's.
"use strict";

(function theme() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const key = "linearize-report-theme";

  function stored() {
    try {
      return window.localStorage.getItem(key);
    } catch {
      return null; // a page opened from a file may have no storage
    }
  }

  function show() {
    const chosen = stored() || root.dataset.theme;
    const dark = chosen ? chosen === "dark" : system.matches;
    if (chosen) root.dataset.theme = chosen;
    button.textContent = dark ? "Light theme" : "Dark theme";
    button.dataset.next = dark ? "light" : "dark";
  }

  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = button.dataset.next;
    try {
      window.localStorage.setItem(key, button.dataset.next);
    } catch {
      // It then holds for this visit only.
    }
    show();
  });
  system.addEventListener("change", show);
  show();
})();

// Only what can be scrolled is a stop of the Tab key.
function markScrollable() {
  document.querySelectorAll(".scroll, pre").forEach((box) => {
    const more = box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1;
    if (more) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  });
}
window.addEventListener("resize", markScrollable);
document.addEventListener("toggle", markScrollable, true);
document.addEventListener("click", markScrollable);
markScrollable();

// Printing shows everything: what was folded is opened, and folded again afterwards.
let opened = [];
window.addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  opened.forEach((details) => (details.open = true));
});
window.addEventListener("afterprint", () => opened.forEach((details) => (details.open = false)));
