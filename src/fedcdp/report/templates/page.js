// The slider shows every attack at the same iteration. Without a script, and in print, the page shows all iterations side by side.
(() => {
  "use strict";
  const slider = document.getElementById("iteration");
  if (!slider) return;
  document.documentElement.classList.add("scripted");
  const output = document.getElementById("iteration-shown");
  const words = slider.dataset.words.split("|");
  const players = [...document.querySelectorAll(".player")].map((player) => [...player.querySelectorAll("li")]);
  const show = () => {
    const at = Number(slider.value);
    for (const frames of players) {
      const reached = frames.filter((frame) => Number(frame.dataset.at) <= at);
      const now = reached[reached.length - 1] || frames[0];
      for (const frame of frames) frame.classList.toggle("now", frame === now);
    }
    slider.setAttribute("aria-valuetext", words[at]);
    output.textContent = words[at];
  };
  slider.addEventListener("input", show);
  slider.value = slider.max;
  show();
})();
// Browsers that cannot unfold a closed part by style alone: open all parts for printing, and close them again.
(() => {
  "use strict";
  const opened = [];
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details:not([open], .values)")) {
      part.open = true;
      opened.push(part);
    }
  });
  addEventListener("afterprint", () => {
    for (const part of opened.splice(0)) part.open = false;
  });
})();
