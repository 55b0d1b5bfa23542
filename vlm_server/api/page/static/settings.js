// The settings in force, and where each was given.

import { adminProblem, get } from "./api.js";
import { $, bytes, empty, h } from "./dom.js";
import { inline } from "./rich.js";

export async function showSettings() {
  if ($("settings").querySelector(".filter")) return;
  try {
    draw((await get("v1/settings")).sections);
  } catch (error) {
    $("settings").replaceChildren(empty("The settings can’t be shown", adminProblem(error)));
  }
}

function draw(sections) {
  const numChanged = sections
    .flatMap(({ settings }) => settings)
    .filter(({ source }) => source !== "default").length;
  const search = h("input", {
    type: "search",
    id: "find-setting",
    placeholder: "Find a setting",
    oninput: update,
  });
  const only = h("input", { type: "checkbox", id: "only-changed", onchange: update });
  const results = h("div.cards.one");
  const none = h("p.muted", { role: "status" });
  $("settings").replaceChildren(
    h(
      "div.filter",
      h("label.hidden", { for: "find-setting" }, "Find a setting"),
      search,
      h("label.check", only, `Changed only (${numChanged})`),
    ),
    none,
    results,
  );
  update();

  function update() {
    const wanted = search.value.trim().toLowerCase();
    const shown = sections
      .map(({ name, settings }) => ({
        name,
        settings: settings.filter(
          (one) =>
            (!only.checked || one.source !== "default") &&
            `${name}.${one.name} ${one.description}`.toLowerCase().includes(wanted),
        ),
      }))
      .filter(({ settings }) => settings.length);
    results.replaceChildren(...shown.map(section));
    none.textContent = shown.length
      ? ""
      : only.checked && !wanted
        ? "Every setting has its default."
        : "No setting is called that.";
  }
}

function section({ name, settings }) {
  return h("section.card", h("header", h("h2", name)), h("dl.settings", settings.map(setting)));
}

function setting({ name, value, default: usual, source, description }) {
  const isChanged = source !== "default";
  return h(
    "div",
    { class: isChanged ? "changed" : null },
    h("dt", h("code", name)),
    h(
      "dd.value",
      h("code", { title: String(value) }, show(name, value)),
      isChanged
        ? h(
            "span.source",
            `${source === "command line" ? "Set on the command line" : `Set in ${source}`}; default ${show(name, usual)}`,
          )
        : null,
    ),
    h("dd.about", inline(description)),
  );
}

function show(name, value) {
  if (value === "" || value?.length === 0) return "none";
  if (Array.isArray(value)) return value.join(", ");
  return name.endsWith("_bytes") && value > 1023 ? bytes(value) : String(value);
}
