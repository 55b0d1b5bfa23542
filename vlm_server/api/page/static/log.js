// The last lines of the server's log, followed while somebody looks.

import { get } from "./api.js";
import { clock, copy, h } from "./dom.js";

const MOST = 500;
const SEVERE = ["warning", "error", "critical"];

let last = 0;
let list = null;
let only = null;

/** The card, made once. */
export function logCard() {
  list = h("div.log.scrolled", { tabindex: "0", role: "log", "aria-label": "The log", "aria-live": "off" });
  only = h("input", { type: "checkbox", id: "only-warnings", onchange: choose });
  last = 0;
  const text = () => [...list.children].map((line) => line.innerText).join("\n");
  const button = h("button.quiet.small", { onclick: () => copy(button, text()) }, "Copy");
  return h(
    "section.card.logged",
    h("header", h("h2", "Log"), h("div.row", h("label.check", only, "Warnings only"), button)),
    list,
  );
}

/** Adds what is new. The list stays at its end if it is there, and where it is if somebody reads. */
export async function followLog() {
  const told = await get(`v1/log?after=${last}`, { quiet: true }).catch(() => null);
  if (!told) return; // asked again with the next look
  if (told.last < last) {
    last = 0; // the server was started again, and counts anew
    return followLog();
  }
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  const news = told.lines.filter(({ number }) => number > last);
  if (!news.length) return;
  last = news.at(-1).number;
  list.append(...news.map(line));
  while (list.children.length > MOST) list.firstChild.remove();
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function line({ time, process, model, level, text }) {
  const isSevere = SEVERE.includes(level);
  return h(
    "p",
    { "data-level": level, hidden: only.checked && !isSevere },
    clock(new Date(time * 1000)),
    " ",
    process === "engine" && h("span.muted", `engine of ${model} `),
    isSevere && h("b", `${level} `),
    text,
  );
}

function choose() {
  for (const item of list.children) item.hidden = only.checked && !SEVERE.includes(item.dataset.level);
  list.scrollTop = list.scrollHeight;
}
