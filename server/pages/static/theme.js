"use strict";
// Light or dark: as the system has it, unless the viewer chose the other. Runs before anything is painted.

const THEME_KEY = "slipstream.theme";
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

// What a browser keeps for this page; one that keeps nothing only forgets.
function recall(storage, name) {
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

// `value` null forgets.
function remember(storage, name, value) {
  try {
    if (value === null) window[storage].removeItem(name);
    else window[storage].setItem(name, value);
  } catch {
    // Storage is switched off: it holds as long as the page.
  }
}

function applyTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

// The other one than is shown; choosing what the system has follows the system again.
function toggleTheme() {
  const system = darkSystem.matches ? "dark" : "light";
  const shown = document.documentElement.dataset.theme ?? system;
  const next = shown === "dark" ? "light" : "dark";
  const choice = next === system ? null : next;
  remember("localStorage", THEME_KEY, choice);
  applyTheme(choice);
}

applyTheme(recall("localStorage", THEME_KEY));
