// The fields of a JSON schema as rows: what a person changes there is written into the text of the schema, and what
// the text says is shown in the rows. Only the text is kept.

import { $, h, icon } from "./dom.js";
import { isObject, readJson } from "./schema.js";

const KINDS = {
  text: ["Text", { type: "string" }],
  integer: ["Whole number", { type: "integer" }],
  number: ["Number", { type: "number" }],
  boolean: ["Yes or no", { type: "boolean" }],
  choice: ["One of…", { type: "string", enum: [] }],
  list: ["List of texts", { type: "array", items: { type: "string" } }],
};
const AS_WRITTEN = "As written";
const NEW = { type: "object", properties: {}, required: [], additionalProperties: false };

/** The fields that are shown, as {name, kind, schema, required}, and the text they are of. */
let fields = [];
let shown = null;
/** What is required, but is no field. */
let others = new Set();

/** Shows the rows. Done again, it changes nothing. */
export function startFields() {
  $("schema-add").addEventListener("click", add);
  addEventListener("options", showFields);
  showFields();
}

function showFields() {
  const text = $("schema").value;
  if (text === shown) return;
  shown = text;
  const found = objectOf(text);
  const { properties, required } = found ?? NEW;
  fields = Object.entries(properties).map(([name, value]) => ({ name, kind: kindOf(value), schema: value, required: required.includes(name) }));
  others = new Set(required.filter((name) => !Object.hasOwn(properties, name)));
  $("schema-add").disabled = !found;
  draw();
}

/** The {properties, required} of the object that a schema describes; null if it describes none. */
function objectOf(text) {
  const [schema, problem] = text.trim() ? readJson(text) : [{}, ""];
  if (problem || !isObject(schema) || (schema.type ?? "object") !== "object") return null;
  const { properties = {}, required = [] } = schema;
  return isObject(properties) && Array.isArray(required) ? { properties, required } : null;
}

function kindOf(schema) {
  const { enum: values, ...rest } = schema ?? {};
  const isChoice = Array.isArray(values) && values.every(isPlain) && JSON.stringify(rest) === '{"type":"string"}';
  if (isChoice) return "choice";
  return Object.keys(KINDS).find((kind) => JSON.stringify(KINDS[kind][1]) === JSON.stringify(schema)) ?? AS_WRITTEN;
}

const valuesOf = (text) => text.split(",").map((one) => one.trim()).filter(Boolean);

/** Whether a line of values with commas can have it, and gives it back. */
const isPlain = (value) => typeof value === "string" && !/[\r\n]/.test(value) && valuesOf(value)[0] === value;

/** Writes the fields into the schema; what else it says stays. */
function write() {
  const [before] = $("schema").value.trim() ? readJson($("schema").value) : [NEW];
  const required = fields.filter((field) => field.required).map(({ name }) => name);
  const schema = {
    ...before,
    type: "object",
    properties: Object.fromEntries(fields.map((field) => [field.name, field.schema])),
    required: [...new Set([...required, ...others])],
  };
  const isNothing = !schema.additionalProperties && !others.size && !fields.length && Object.keys(schema).every((key) => Object.hasOwn(NEW, key));
  shown = $("schema").value = isNothing ? "" : JSON.stringify(schema, null, 1);
  $("schema").dispatchEvent(new Event("input"));
}

function add() {
  let [name, number] = ["field", 1];
  while (fields.some((field) => field.name === name)) name = `field_${++number}`;
  fields.push({ name, kind: "text", schema: KINDS.text[1], required: true });
  write();
  draw();
  $("schema-fields").lastChild.querySelector("input").select();
}

const draw = () => $("schema-fields").replaceChildren(...fields.map(row));

function row(field, index) {
  const label = `field ${index + 1}`;
  const change = (changes, again) => {
    Object.assign(field, changes);
    write();
    if (!again) return;
    draw();
    $("schema-fields").children[fields.indexOf(field)].querySelector(again).focus();
  };
  const require = () => {
    others.delete(field.name);
    change({ required: required.checked });
  };
  const remove = () => {
    fields.splice(fields.indexOf(field), 1);
    write();
    draw();
    $("schema-add").focus();
  };
  const kinds = [...Object.entries(KINDS).map(([kind, [label]]) => [kind, label]), ...(field.kind === AS_WRITTEN ? [[AS_WRITTEN, AS_WRITTEN]] : [])];
  const kind = h(
    "select",
    { "aria-label": `Kind of ${label}`, onchange: () => change({ kind: kind.value, schema: KINDS[kind.value][1] }, kind.value === "choice" ? ".choices" : "select") },
    kinds.map(([value, label]) => h("option", { value, selected: value === field.kind }, label)),
  );
  const required = h("input", { type: "checkbox", "aria-label": `Whether ${label} is required`, onchange: require });
  required.checked = field.required;
  return h(
    "li",
    nameOf(field, label, change),
    h("span.pick", kind),
    h("label.check", required, "Required"),
    h("button.icon", { type: "button", "aria-label": `Remove ${label}`, title: "Remove", onclick: remove }, icon("close")),
    field.kind === "choice" && choices(field, label, change),
  );
}

/** A name that is empty, or another field's, is marked, and given up when the box is left. */
function nameOf(field, label, change) {
  const mark = (isWrong) => {
    box.setAttribute("aria-invalid", String(isWrong));
    box.title = isWrong ? "Each field needs a name of its own." : "";
  };
  const box = h("input", {
    "aria-label": `Name of ${label}`,
    autocomplete: "off",
    spellcheck: "false",
    oninput: () => {
      const isWrong = !box.value || fields.some((other) => other !== field && other.name === box.value);
      mark(isWrong);
      if (!isWrong) change({ name: box.value });
    },
    onchange: () => {
      box.value = field.name;
      mark(false);
    },
  });
  box.value = field.name;
  return box;
}

function choices(field, label, change) {
  const box = h("input.choices", {
    "aria-label": `Choices of ${label}, with commas`,
    placeholder: "red, green, blue",
    oninput: () => change({ schema: { type: "string", enum: [...new Set(valuesOf(box.value))] } }),
  });
  box.value = field.schema.enum.join(", ");
  return box;
}
