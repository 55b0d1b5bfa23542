// The settings in force: what differs from the defaults, the values that automatic settings came to, and changes.

import { adminProblem, ask, get } from "./api.js";
import { $, bytes, copy, count, empty, h, seconds } from "./dom.js";
import { inline } from "./rich.js";

const SECRET = "api_keys";

let sections = [];
/** The full name of the setting that is being changed, and why the last try failed. */
let editing = null;
let problem = "";

export async function showSettings() {
  if (editing) return;
  try {
    sections = (await get("v1/settings")).sections;
    if (!$("settings-body").querySelector(".filter")) frame();
    update();
  } catch (error) {
    $("settings-body").replaceChildren(empty("The settings can’t be shown", adminProblem(error)));
  }
}

function frame() {
  const button = h("button.quiet", { title: "What differs from the defaults, for a settings file", onclick: () => copy(button, toml()) }, "Copy as TOML");
  $("settings-body").replaceChildren(
    h(
      "div.filter",
      h("label.hidden", { for: "find-setting" }, "Find a setting"),
      h("input", { type: "search", id: "find-setting", placeholder: "Find a setting", oninput: update }),
      button,
    ),
    h("p.muted.small", { role: "status", id: "settings-found" }),
    h("div.cards.one", { id: "settings-list" }),
  );
}

const isChanged = ({ source, value, default: usual }) =>
  source !== "default" && JSON.stringify(value) !== JSON.stringify(usual);
const cameTo = ({ effective, value }) => effective !== null && effective !== value;

/** The sections in the order in which a person looks for them: what is served, with what, to whom, how much. */
const GROUPS = [
  ["Model", ["model"]],
  ["Memory and caches", ["memory", "cache"]],
  ["Address, keys and connections", ["server"]],
  ["Pictures, videos and documents", ["image", "video", "document", "urls"]],
  ["Limits and deadlines", ["limits", "deadlines"]],
  ["Files, batches and watches", ["files", "batches", "watch"]],
  ["Log and metrics", ["log", "metrics", "tracing"]],
  ["Engine", ["scheduler", "engine", "distributed"]],
];
const OTHERS = "Others";
const unfolded = new Set();

/** {title, settings} of each group that has some; a setting here has its `section`, too. */
function groups() {
  const of = new Map([...GROUPS.map(([title]) => title), OTHERS].map((title) => [title, []]));
  const titleOf = (part) => GROUPS.find(([, parts]) => parts.includes(part.split(".")[0].replace("models", "model")))?.[0] ?? OTHERS;
  const order = (part) => GROUPS.flatMap(([, parts]) => parts).indexOf(part);
  for (const { name: section, settings } of sections.toSorted((a, b) => order(a.name) - order(b.name)))
    of.get(titleOf(section)).push(...settings.map((one) => ({ ...one, section })));
  return [...of].map(([title, settings]) => ({ title, settings })).filter(({ settings }) => settings.length);
}

function update() {
  const wanted = $("find-setting").value.trim().toLowerCase();
  const all = groups();
  if (wanted) {
    const found = all.map(({ title, settings }) => ({ title, settings: settings.filter((one) => textOf(one).includes(wanted)) }));
    $("settings-list").replaceChildren(...found.map(({ title, settings }) => card(title, "", settings)).filter(Boolean));
    $("settings-found").textContent = $("settings-list").children.length ? "" : "No setting is called that.";
    return;
  }
  const every = all.flatMap(({ settings }) => settings);
  const changed = every.filter(isChanged);
  const rest = every.filter((one) => !isChanged(one));
  const cards = [
    card("Changed", "What differs from the defaults", changed) ?? h("section.card", empty("Every setting has its default")),
    card("Can be changed now", "Others need a restart", rest.filter(({ live }) => live)),
    card("Chosen for this machine", "The values that automatic settings came to", rest.filter(cameTo)),
    h("header.sub-head.all", h("h2", "All settings"), h("button.link", { type: "button", onclick: () => foldAll(all) }, foldWord())),
    ...all.map(fold),
  ];
  $("settings-list").replaceChildren(...cards.filter(Boolean));
  $("settings-found").textContent = "";
}

const textOf = (one) => `${one.section}.${one.name} ${one.description}`.toLowerCase();

/** A card of `settings`; null if there is none. */
const card = (title, about, settings) =>
  settings.length ? h("section.card", h("header", h("h2", title), h("p", about)), h("dl.settings", settings.map((one) => setting(one, true)))) : null;

const foldWord = () => (unfolded.size ? "Fold all" : "Unfold all");

function foldAll(all) {
  if (unfolded.size) unfolded.clear();
  else for (const { title } of all) unfolded.add(title);
  update();
  document.querySelector(".all .link").focus();
}

/** A group, folded until it is asked for. What can be changed in it is so in the cards above. */
function fold({ title, settings }) {
  const changed = settings.filter(isChanged).length;
  const list = h("dl.settings");
  const fill = () => list.children.length || list.append(...settings.map((one) => setting(one, false)));
  const element = h(
    "details.card",
    {
      open: unfolded.has(title),
      ontoggle: () => {
        unfolded[element.open ? "add" : "delete"](title);
        document.querySelector(".all .link").textContent = foldWord();
        fill();
      },
    },
    h("summary", h("h3", title), h("span.muted.small", `${settings.length} settings${changed ? `, ${changed} changed` : ""}`)),
    list,
  );
  if (element.open) fill();
  return element;
}

function setting(one, mayEdit) {
  const { section: part, name, value, default: usual, source, effective, description, live } = one;
  const full = `${part}.${name}`;
  const from = source === "command line" ? "Set on the command line" : source[0] === "/" || source.startsWith("VLM_") ? `Set in ${source}` : source;
  const notes = [
    cameTo(one) && `from ${show(name, value)}`,
    isChanged(one) && `${from}; default ${show(name, usual)}`,
  ];
  return h(
    "div",
    { class: isChanged(one) ? "changed" : null },
    h("dt", h("code", h("span.muted", `${part}.`), name.split(/(?<=_)/).flatMap((word) => [h("wbr"), word]))),
    h(
      "dd.value",
      h("code", { title: String(value) }, show(name, cameTo(one) ? effective : value)),
      notes.filter(Boolean).map((note) => h("span.source", note)),
      live && mayEdit && editing !== full && h("button.link.small", { "aria-label": `Change ${full}`, onclick: () => edit(full) }, "Change"),
    ),
    h("dd.about", inline(description), live || !isChanged(one) ? "" : h("span.source", "A change needs a restart.")),
    mayEdit && editing === full && h("dd.edit", form(full, one)),
  );
}

function edit(full) {
  editing = full;
  problem = "";
  update();
  $("new-value")?.focus();
}

function form(full, { name, value }) {
  const field = h("input", { id: "new-value", value: String(value), autocomplete: "off", spellcheck: "false", "aria-label": `New value of ${full}`, "aria-describedby": "value-problem" });
  const close = () => {
    editing = null;
    update();
    document.querySelector(`[aria-label="Change ${CSS.escape(full)}"]`)?.focus();
  };
  const send = async (event) => {
    event.preventDefault();
    try {
      const body = { [full]: field.value.trim() };
      sections = (await (await ask("v1/settings", { method: "PATCH", body })).json()).sections;
      close();
    } catch (error) {
      problem = error.message;
      $("value-problem").textContent = problem;
      field.setAttribute("aria-invalid", "true");
      field.focus();
    }
  };
  return h(
    "form",
    { onsubmit: send },
    h("p.row.wraps", field, h("button.primary.small", "Save"), h("button.quiet.small", { type: "button", onclick: close }, "Cancel")),
    h("p.problem", { id: "value-problem", role: "alert" }, problem),
    h("p.muted.small", name.endsWith("_seconds") ? "A time, as 90s or 5m. " : "", "Until the server ends: to keep it, copy it as TOML into its settings file."),
  );
}

/** What differs from the defaults, as a settings file has it; keys are left out. */
function toml() {
  const parts = sections.flatMap(({ name, settings }) => {
    const lines = settings.filter((one) => isChanged(one) && one.name !== SECRET).map((one) => `${one.name} = ${literal(one.value)}`);
    return lines.length ? [`[${name.startsWith("models.") ? `models.${JSON.stringify(name.slice(7))}` : name}]\n${lines.join("\n")}\n`] : [];
  });
  return parts.join("\n") || "# Every setting has its default.\n";
}

// TOML's strings, numbers, booleans and lists of these are those of JSON, but for tables
const literal = (value) => JSON.stringify(value);

const UNITS = { _tokens: "tokens", _pixels: "pixels", _chars: "characters" };

function show(name, value) {
  if (value === "" || value === null || value?.length === 0) return "none";
  if (Array.isArray(value)) return value.join(", ");
  if (typeof value !== "number") return typeof value === "object" ? JSON.stringify(value) : String(value);
  if (name.endsWith("_bytes")) return value > 1023 ? bytes(value) : `${value} B`;
  if (name.endsWith("_seconds")) return value ? seconds(value) : "0 s";
  const unit = UNITS[name.slice(name.lastIndexOf("_"))];
  return unit ? `${count(value)} ${unit}` : String(value);
}
