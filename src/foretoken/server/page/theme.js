// Loaded before the page is drawn, so that it never shows in the wrong colours first. "light" and
// "dark" are what the switch was set to; without them the system's choice holds.
{
  const chosen = localStorage.getItem("foretoken-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
