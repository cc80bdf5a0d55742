// The page works without this: all maps are then shown, and the theme is the system's.
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

// Tabs: one map at a time; arrow keys, Home and End move between heads.
document.querySelectorAll("[data-picker]").forEach((picker) => {
  const tabs = [...picker.querySelectorAll("[role=tab]")];
  const panels = [...picker.querySelectorAll("[role=tabpanel]")];

  function select(index) {
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === index));
      tab.tabIndex = i === index ? 0 : -1;
      panels[i].classList.toggle("unchosen", i !== index);
    });
  }

  picker.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const now = tabs.indexOf(document.activeElement);
    const last = tabs.length - 1;
    const moves = {
      ArrowRight: now === last ? 0 : now + 1,
      ArrowDown: now === last ? 0 : now + 1,
      ArrowLeft: now === 0 ? last : now - 1,
      ArrowUp: now === 0 ? last : now - 1,
      Home: 0,
      End: last,
    };
    if (now < 0 || !(event.key in moves)) return;
    event.preventDefault();
    select(moves[event.key]);
    tabs[moves[event.key]].focus();
  });
  tabs.forEach((tab, index) => tab.addEventListener("click", () => select(index)));
  picker.classList.add("live");
  select(0);
});

// What lies under the pointer. The same is in the table of the map, for those who use none.
document.querySelectorAll("[data-map]").forEach((panel) => {
  const map = JSON.parse(panel.querySelector("script").textContent);
  const svg = panel.querySelector("svg");
  const readout = panel.querySelector(".readout");

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const y = (event.clientY - box.top) * scale;
    const cells = map.corners.map(([left, top]) => [Math.floor((x - left) / map.cell), Math.floor((y - top) / map.cell)]);
    const found = cells.find(([key, query]) => key >= 0 && key < (map.weights[0][query] || []).length);
    if (!found) return;
    const [key, query] = found;
    const [teacher, student] = map.weights.map((grid) => grid[query][key].toFixed(4));
    readout.textContent =
      `query ${query} ${map.tokens[query]}, key ${key} ${map.tokens[key]}: teacher ${teacher}, student ${student}`;
  });
});

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
