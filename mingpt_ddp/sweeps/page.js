"use strict";
// A job stands out wherever it is drawn; columns sort; the command line is copied.
const tip = document.getElementById("tip");
const rows = [...document.querySelectorAll("tbody tr")];
const tips = new Map(rows.map(row => [row.dataset.job, row.dataset.tip]));
const drawn = new Map();
for (const element of document.querySelectorAll("[data-job]")) {
  const job = element.dataset.job;
  drawn.set(job, [...(drawn.get(job) || []), element]);
}
let shown = null;

function show(job) {
  if (job === shown) return;
  for (const element of drawn.get(shown) || []) element.classList.remove("on");
  for (const element of drawn.get(job) || []) element.classList.add("on");
  document.body.classList.toggle("hovering", job !== null);
  shown = job;
}

// A thin line is hard to meet: a wide one that nobody sees lies above it.
for (const line of document.querySelectorAll("path.line")) {
  const hit = line.cloneNode();
  hit.setAttribute("class", "hit");
  line.after(hit);
}

document.addEventListener("mousemove", event => {
  const element = event.target.closest("[data-job]");
  show(element ? element.dataset.job : null);
  tip.hidden = !element || element.tagName === "TR";
  if (tip.hidden) return;
  tip.textContent = tips.get(shown);
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const above = event.clientY + 20 + tip.offsetHeight > window.innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above ? event.clientY - tip.offsetHeight - 10 : event.clientY + 16}px`;
});
document.documentElement.addEventListener("mouseleave", () => { show(null); tip.hidden = true; });

// Numbers by size, before text by alphabet; empty cells last, whichever way.
function sort(head) {
  const column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const key = row => {
    const cell = row.cells[column];
    if (cell.dataset.value !== undefined) return [0, Number(cell.dataset.value)];
    return [cell.textContent === "-" ? 2 : 1, cell.textContent];
  };
  const compare = (one, other) => {
    const [a, b] = [key(one), key(other)];
    if (a[0] !== b[0]) return a[0] === 2 || b[0] === 2 ? a[0] - b[0] : down * (a[0] - b[0]);
    return down * (a[0] === 0 ? a[1] - b[1] : a[1].localeCompare(b[1]));
  };
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down === 1 ? "ascending" : "descending");
  rows.sort(compare).forEach(row => row.parentNode.append(row));
}
for (const head of document.querySelectorAll("th")) head.addEventListener("click", () => sort(head));

const copy = document.getElementById("copy");
if (copy) copy.addEventListener("click", async () => {
  const command = document.getElementById("command");
  try {
    await navigator.clipboard.writeText(command.textContent);
    copy.textContent = "Copied";
  } catch { // not allowed here: it is marked, for the keyboard to copy
    window.getSelection().selectAllChildren(command);
    copy.textContent = "Marked";
  }
});
