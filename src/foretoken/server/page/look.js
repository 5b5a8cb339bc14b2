// How the page is shown: light or dark, with the colours of tokens or without, and on narrow
// screens the two sides as drawers over the text.

const root = document.documentElement;
const { body } = document;
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);

export function followTheme(button) {
  const tell = () => button.setAttribute("aria-pressed", isDark());
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("foretoken-theme", root.dataset.theme);
    tell();
  });
  dark.addEventListener("change", tell);
  tell();
}

/** changed: called where another view is chosen. */
export function followViews(fieldset, changed) {
  const tell = () => {
    body.dataset.view = fieldset.querySelector(":checked").value;
    changed();
  };
  fieldset.addEventListener("change", tell);
  tell();
}

const openers = [...document.querySelectorAll("button[aria-controls]")];

/** Whether one was open. `giveBack`: the focus, to the button that opened it. */
export function closeDrawer(giveBack = false) {
  const opener = openers.find((button) => button.getAttribute("aria-expanded") === "true");
  if (!opener) return false;
  delete body.dataset.drawer;
  opener.setAttribute("aria-expanded", "false");
  if (giveBack) opener.focus();
  return true;
}

export function followDrawers() {
  for (const opener of openers) {
    opener.addEventListener("click", () => {
      const name = opener.getAttribute("aria-controls");
      const opens = body.dataset.drawer !== name;
      closeDrawer();
      if (!opens) return;
      body.dataset.drawer = name;
      opener.setAttribute("aria-expanded", "true");
      document.getElementById(name).focus();
    });
  }
  document.querySelector("main").addEventListener("click", () => closeDrawer());
}
