// The conversations that this browser keeps: found, opened, renamed, exported, deleted.

import { later } from "./api.js";
import { $, h, icon, keep, kept, memorySize, refill } from "./dom.js";
import * as session from "./session.js";
import * as store from "./store.js";

const HIDDEN = "vlm_server hides conversations";
const WIDE = matchMedia("(min-width: 1100px)");

let list = [];
let found = null; // ids that a search found; null without one

export function startHistory({ startAnew }) {
  $("show-history").addEventListener("click", () => setOpen(!isOpen()));
  $("hide-history").addEventListener("click", () => setOpen(false));
  $("new-here").addEventListener("click", () => {
    startAnew();
    if (!WIDE.matches) setOpen(false);
  });
  $("find").addEventListener("input", search);
  $("export-all").addEventListener("click", async () => (await transcript())?.saveJson(list.map(({ id }) => id)));
  $("history").addEventListener("focusout", closeMenus);
  document.addEventListener("click", (event) => closeMenus({ relatedTarget: event.target }));
  for (const name of ["kept", "opened", "run"]) addEventListener(name, refresh);
  const begin = () => setOpen(WIDE.matches && kept(HIDDEN) === null, false);
  begin();
  WIDE.addEventListener("change", begin);
  refresh();
}

const transcript = () => later("./transcript.js");

const isOpen = () => !$("history").hidden;

function setOpen(open, isWish = true) {
  $("history").hidden = !open;
  $("shade").hidden = !open || WIDE.matches;
  document.body.classList.toggle("with-history", open);
  $("show-history").setAttribute("aria-expanded", String(open));
  if (!isWish) return;
  if (WIDE.matches) keep(HIDDEN, open ? "" : "yes");
  (open ? $("find") : $("show-history")).focus();
}

/** Closes an open menu, or the list where it covers the conversation; returns whether there was one. */
export function closeHistory() {
  const menu = $("history").querySelector("details[open]");
  if (menu) {
    menu.open = false;
    menu.querySelector("summary").focus();
    return true;
  }
  if (!isOpen() || WIDE.matches) return false;
  setOpen(false);
  return true;
}

function closeMenus({ relatedTarget }) {
  for (const menu of $("history").querySelectorAll("details[open]")) if (!menu.contains(relatedTarget)) menu.open = false;
}

async function search() {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) found = null;
  else {
    const texts = await store.all().catch(() => []);
    const has = (one) => {
      const text = [one.title, ...one.turns.flatMap((turn) => [turn.text, ...turn.answers.map((answer) => answer.text), ...turn.media.map(({ name }) => name)])]
        .join("\n")
        .toLowerCase();
      return words.every((word) => text.includes(word));
    };
    found = new Set(texts.filter(has).map(({ id }) => id));
  }
  show();
}

async function refresh() {
  list = await store.summaries().catch(() => []);
  show();
}

function show() {
  const shown = found ? list.filter(({ id }) => found.has(id)) : list;
  if ($("history-list").querySelector("details[open], input")) return; // not below somebody's hand
  refill($("history-list"), shown.length ? shown.map(item) : [h("li.none", found ? "Nothing found." : "Conversations are kept here, in this browser.")]);
  $("history-size").textContent = list.length ? `${memorySize(store.sizeOf(list))} of ${memorySize(store.MAX_BYTES)}` : "";
  $("history-end").hidden = !list.length;
}

function item({ id, title, updated }) {
  const isCurrent = id === session.openId();
  const pick = async () => {
    location.hash = "#ask";
    if (!(await session.open(id).catch(() => false))) refresh();
    if (!WIDE.matches) setOpen(false);
  };
  const act = (label, does, kind = "") => h("li", h("button", { type: "button", class: kind, onclick: does }, label));
  const menu = h(
    "details.menu",
    h("summary", { "aria-label": `More about ${title}`, title: "More" }, icon("more")),
    h(
      "ul",
      act("Rename", () => rename(menu, id, title)),
      act("Save as Markdown", async () => ((menu.open = false), (await transcript())?.saveMarkdown(id))),
      act("Save as JSON", async () => ((menu.open = false), (await transcript())?.saveJson([id]))),
      act("Delete", () => confirmDelete(menu, id, title), "danger"),
    ),
  );
  return h(
    "li",
    { class: session.isRunning(id) ? "running" : "" },
    h(
      "button.pick-one",
      { type: "button", "data-id": id, "aria-current": isCurrent && "true", onclick: pick },
      h("span.name", title || "Untitled"),
      h("span.when", session.isRunning(id) ? "Being answered" : when(updated)),
    ),
    menu,
  );
}

function rename(menu, id, title) {
  const row = menu.closest("li");
  const field = h("input", { "aria-label": "New name", maxlength: "120" });
  field.value = title;
  let isDone = false;
  const form = h("form.rename", {
    onsubmit: async (event) => {
      event.preventDefault();
      if (isDone) return;
      isDone = true;
      await session.rename(id, field.value.trim() || title);
      form.remove();
      await refresh();
      $("history-list").querySelector(`[data-id="${id}"]`)?.focus();
    },
    onkeydown: (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      isDone = true;
      form.remove();
      refresh();
    },
    onfocusout: () => isDone || form.requestSubmit(),
  }, field);
  row.replaceChildren(form);
  field.select();
}

function confirmDelete(menu, id, title) {
  menu.open = false;
  const dialog = h(
    "dialog",
    { "aria-label": "Delete the conversation", onclose: () => dialog.remove() },
    h(
      "form",
      { method: "dialog", onsubmit: () => session.forget(id).then(refresh) },
      h("h2", "Delete this conversation?"),
      h("p", `“${title}” and its pictures are removed from this browser. That can’t be undone.`),
      h("div.row.end", h("button.quiet", { type: "button", onclick: () => dialog.close() }, "Keep"), h("button.primary.danger", "Delete")),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
}

const TIMES = new Intl.DateTimeFormat("en", { hour: "numeric", minute: "2-digit" });
const DAYS = new Intl.DateTimeFormat("en", { day: "numeric", month: "short", year: "numeric" });

function when(time) {
  const isToday = new Date(time).toDateString() === new Date().toDateString();
  return isToday ? TIMES.format(time) : DAYS.format(time);
}
