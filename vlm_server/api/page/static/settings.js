// The settings in force: what differs from the defaults, the values that automatic settings came to, and changes.

import { adminProblem, ask, get } from "./api.js";
import { $, copy, count, empty, h, inline, memorySize } from "./dom.js";
import { fullName, plain, settingForm, table } from "./setting_form.js";

const SECRET = "api_keys";

/** What `/v1/settings` says: {file, common, sections}; a server of another version may not say all. */
let told = null;
/** Ends the change of a setting that is under way. */
let close = null;

export async function showSettings() {
  if (close) return;
  try {
    told = await get("v1/settings");
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
    h("p.muted.small", { id: "settings-help" }),
    h("p.muted.small", { role: "status", id: "settings-found" }),
    h("div.cards.one", { id: "settings-list" }),
  );
}

const isChanged = ({ source, value, default: usual }) =>
  source !== "default" && JSON.stringify(value) !== JSON.stringify(usual);
const cameTo = ({ effective, value }) => effective !== null && effective !== value;
/** The settings file in use, or the one that would be. */
const file = () => told.file ?? "the settings file";

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
  for (const { name: section, settings } of told.sections.toSorted((a, b) => order(a.name) - order(b.name)))
    of.get(titleOf(section)).push(...settings.map((one) => ({ ...one, section })));
  return [...of].map(([title, settings]) => ({ title, settings })).filter(({ settings }) => settings.length);
}

function update() {
  close = null;
  const wanted = $("find-setting").value.trim().toLowerCase();
  const all = groups();
  $("settings-help").hidden = Boolean(wanted);
  if (wanted) {
    const found = all.map(({ title, settings }) => ({ title, settings: settings.filter((one) => textOf(one).includes(wanted)) }));
    $("settings-list").replaceChildren(...found.map(({ title, settings }) => card(title, "", settings)).filter(Boolean));
    tell($("settings-list").children.length ? "" : "No setting is called that.");
    return;
  }
  tell("");
  const every = all.flatMap(({ settings }) => settings);
  const common = (told.common ?? []).map((name) => every.find((one) => fullName(one) === name)).filter(Boolean);
  const changed = every.filter(isChanged);
  const cards = [
    card("Most used", changed.length ? "" : "Every setting has its default", common),
    card("Changed", "What else differs from the defaults", changed.filter((one) => !common.includes(one))),
    h("header.sub-head.all", h("h2", "All settings"), h("button.link", { type: "button", onclick: () => foldAll(all) }, foldWord())),
    ...all.map(fold),
  ];
  $("settings-list").replaceChildren(...cards.filter(Boolean));
  $("settings-help").textContent = `What can change while the server runs is changed here. All else goes into ${file()}, and holds from the next start.`;
}

/** Screen readers say a text once, not at each letter of a search. */
const tell = (text) => $("settings-found").textContent === text || ($("settings-found").textContent = text);

const textOf = (one) => `${LABELS[fullName(one)] ?? ""} ${fullName(one)} ${one.description}`.toLowerCase();

/** A card of `settings`; null if there is none. */
const card = (title, about, settings) =>
  settings.length ? h("section.card", h("header", h("h2", title), h("p", about)), h("dl.settings", settings.map(setting))) : null;

const foldWord = () => (unfolded.size ? "Fold all" : "Unfold all");

function foldAll(all) {
  if (unfolded.size) unfolded.clear();
  else for (const { title } of all) unfolded.add(title);
  update();
  document.querySelector(".all .link").focus();
}

/** A group, folded until it is asked for. */
function fold({ title, settings }) {
  const changed = settings.filter(isChanged).length;
  const list = h("dl.settings");
  const fill = () => list.children.length || list.append(...settings.map(setting));
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

/** What people call the settings that they change. */
export const LABELS = {
  "model.path": "Model",
  "model.aliases": "Other names of the model",
  "model.keep_alive_seconds": "Unload when unused for",
  "model.max_context_tokens": "Longest conversation",
  "server.host": "Address",
  "server.port": "Port",
  "server.api_key_file": "File with API keys",
  "memory.max_bytes": "Memory for models",
  "scheduler.max_num_seqs": "Answers at a time",
  "cache.max_disk_bytes": "Cache on disk",
  "cache.kv_bits": "Precision of the cache",
  "image.max_pixels": "Largest picture",
  "limits.max_requests": "Requests at a time",
  "urls.https_hosts": "Websites that pictures may come from",
  "log.level": "What the log tells",
};

function setting(one) {
  const { section: part, name, source, description, live } = one;
  const from = WHERE[source] ?? `Set in ${source}`; // a file, or a variable of the environment
  const notes = [
    cameTo(one) && `from ${show(one.value_written)}`,
    isChanged(one) && `${from}; default ${show(one.default_written)}`,
  ];
  const label = LABELS[fullName(one)];
  const written = h("code", h("span.muted", `${part}.`), name.split(/(?<=_)/).flatMap((word) => [h("wbr"), word]));
  const button = h("button.link.small", { "aria-label": `Change ${fullName(one)}`, onclick: () => edit(one, row, button) }, "Change");
  const row = h(
    "div",
    { class: isChanged(one) ? "changed" : null },
    h("dt", label ? h("b", label) : written),
    h(
      "dd.value",
      h("code", { title: String(one.value) }, cameTo(one) ? came(one) : show(one.value_written)),
      name !== SECRET && button,
      notes.filter(Boolean).map((note) => h("span.source", note)),
    ),
    h("dd.about", h("p.when", label && [written, " · "], live ? "changes at once" : "needs a restart"), inline(description)),
  );
  return row;
}

const WHERE = { "command line": "Set on the command line", "changed while running": "Changed while running" };
const show = (written) => plain(written) || "none";
const came = ({ name, effective }) => (name.endsWith("_bytes") ? memorySize(effective) : count(effective));

/** Opens the form in which a setting is changed, in its `row`; one at a time. */
function edit(one, row, button) {
  close?.();
  const save = async (value) => {
    told = await (await ask("v1/settings", { method: "PATCH", body: { [fullName(one)]: value } })).json();
    update();
    document.querySelector(`[aria-label="Change ${CSS.escape(fullName(one))}"]`)?.focus();
  };
  const box = h("dd.edit", settingForm(one, file(), save));
  close = () => {
    box.remove();
    button.hidden = false;
    close = null;
  };
  button.hidden = true;
  row.append(box);
  const field = box.querySelector(":is(input, select):not([hidden])");
  field.focus();
  field.select?.();
  box.addEventListener("reset", () => {
    close();
    button.focus();
  });
}

/** What differs from the defaults, as a settings file has it; keys are left out. */
function toml() {
  const parts = told.sections.map(({ name, settings }) => [name, settings.filter((one) => isChanged(one) && one.name !== SECRET)]);
  const tables = parts.filter(([, settings]) => settings.length).map(([name, settings]) => table(name, settings.map((one) => [one.name, one.value_written])));
  return tables.join("\n") || "# Every setting has its default.\n";
}
