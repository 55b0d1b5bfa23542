// What is wrong with JSON, with a JSON schema, or with a list of tools, in words.

const TYPES = ["object", "array", "string", "number", "integer", "boolean", "null"];
const WORDS =
  "$defs $id $ref $schema additionalProperties allOf anyOf const default definitions description enum examples exclusiveMaximum exclusiveMinimum format items maxItems maxLength maxProperties maximum minItems minLength minProperties minimum multipleOf oneOf pattern patternProperties prefixItems properties propertyNames required title type uniqueItems".split(
    " ",
  );
const MAX_DEPTH = 40;

/** [value, ""], or [undefined, what is wrong and where]. */
export function readJson(text) {
  try {
    return [JSON.parse(text), ""];
  } catch (error) {
    return [undefined, `This is not valid JSON${placeOf(error.message, text)}: ${wordsOf(error.message)}`];
  }
}

/** " in line 2, column 5 (after …)", from what browsers say. */
function placeOf(message, text) {
  const [, position] = message.match(/position (\d+)/) ?? [];
  const [, line, column] = message.match(/line (\d+),? column (\d+)/) ?? [];
  if (line) return ` in line ${line}, column ${column}`;
  const at = position ? Number(position) : firstFault(text);
  const before = text.slice(0, at).split("\n");
  return ` in line ${before.length}, column ${before.at(-1).length + 1}`;
}

/** The place of the character with which JSON can't go on: a beginning that ends before it is merely not whole. */
function firstFault(text) {
  let [good, bad] = [0, text.length];
  while (bad - good > 1) {
    const middle = (good + bad) >> 1;
    if (isBeginning(text.slice(0, middle))) good = middle;
    else bad = middle;
  }
  return bad - 1;
}

function isBeginning(text) {
  try {
    JSON.parse(text);
  } catch (error) {
    const [, position] = error.message.match(/position (\d+)/) ?? [];
    return Number(position) === text.length || /unexpected end|unterminated|end of data/i.test(error.message);
  }
  return true;
}

const wordsOf = (message) => {
  const text = message
    .replace(/^JSON\.parse: /, "")
    .replace(/ (in JSON )?at (position|line) .*$/s, "")
    .replace(/, (\.{3})?".*" is not valid JSON$/s, "");
  return `${text[0].toLowerCase()}${text.slice(1)}.`;
};

export function schemaProblem(text) {
  if (!text.trim()) return "";
  const [schema, problem] = readJson(text);
  return problem || problemOf(schema, "The schema", 0);
}

function problemOf(schema, name, depth) {
  if (typeof schema === "boolean") return "";
  if (!isObject(schema)) return `${name} must be an object in braces.`;
  if (depth > MAX_DEPTH) return `${name} is nested too deeply.`;
  for (const word of Object.keys(schema)) {
    const near = WORDS.includes(word) ? null : nearest(word, WORDS);
    if (near) return `${name} has “${word}”. Is “${near}” meant?`;
  }
  const { type, properties, required, items, enum: values, anyOf } = schema;
  for (const one of [type ?? []].flat())
    if (!TYPES.includes(one)) {
      const near = nearest(String(one), TYPES);
      return `${name} has the type “${one}”. ${near ? `Is “${near}” meant?` : `A type is one of: ${TYPES.join(", ")}.`}`;
    }
  if (values !== undefined && !(Array.isArray(values) && values.length))
    return `“enum” of ${lower(name)} must be a list with at least one value.`;
  if (properties !== undefined && !isObject(properties)) return `“properties” of ${lower(name)} must be an object in braces.`;
  if (required !== undefined) {
    if (!Array.isArray(required) || required.some((one) => typeof one !== "string"))
      return `“required” of ${lower(name)} must be a list of names.`;
    const missing = required.find((one) => properties && !(one in properties) && schema.additionalProperties === undefined);
    if (missing) return `“required” of ${lower(name)} names “${missing}”, which is not in its “properties”.`;
  }
  if (anyOf !== undefined && !Array.isArray(anyOf)) return `“anyOf” of ${lower(name)} must be a list of schemas.`;
  const inner = [
    ...Object.entries(properties ?? {}).map(([key, value]) => [value, `“${key}”`]),
    ...(items === undefined ? [] : [[items, `“items” of ${lower(name)}`]]),
    ...(anyOf ?? []).map((value, index) => [value, `Choice ${index + 1} of ${lower(name)}`]),
  ];
  for (const [value, path] of inner) {
    const problem = problemOf(value, path, depth + 1);
    if (problem) return problem;
  }
  return "";
}

export function toolsProblem(text) {
  if (!text.trim()) return "";
  const [tools, problem] = readJson(text);
  if (problem) return problem;
  if (!Array.isArray(tools)) return "The tools must be a list in square brackets.";
  for (const [index, tool] of tools.entries()) {
    const name = `Tool ${index + 1}`;
    if (tool?.type !== "function" || !isObject(tool.function))
      return `${name} must have the form {"type": "function", "function": {"name": …}}.`;
    if (!/^[\w.-]{1,64}$/.test(tool.function.name ?? "")) return `${name} needs a name of letters, digits, _ and -.`;
    const { parameters } = tool.function;
    const wrong = parameters === undefined ? "" : problemOf(parameters, `“parameters” of ${lower(name)}`, 0);
    if (wrong) return wrong;
  }
  return "";
}

export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const lower = (name) => name[0].toLowerCase() + name.slice(1);

/** The known word that differs from `word` by at most two letters, if there is one. */
function nearest(word, known) {
  if (word.length > 24) return null;
  const far = known.map((one) => [distance(word.toLowerCase(), one.toLowerCase()), one]);
  const [least, near] = far.sort(([one], [other]) => one - other)[0];
  return least <= Math.min(2, Math.floor(near.length / 3)) ? near : null;
}

function distance(one, other) {
  let row = [...Array(other.length + 1).keys()];
  for (let i = 1; i <= one.length; i++) {
    const next = [i];
    for (let j = 1; j <= other.length; j++)
      next[j] = Math.min(next[j - 1] + 1, row[j] + 1, row[j - 1] + (one[i - 1] === other[j - 1] ? 0 : 1));
    row = next;
  }
  return row[other.length];
}
