// A request as a command for a terminal, and as a program. Files stand for what is attached.

import { hasKey } from "./api.js";

/** `names` are those of the media of `body`, in order. */
export function asCurl(body, names) {
  const [text, files] = withPlaces(body, names);
  const quoted = JSON.stringify(text, null, 1).replace(/[\\$`]/g, "\\$&");
  const filled = quoted.replace(PLACE, (_, index) => {
    const { type, name } = files[index];
    return `data:${type};base64,$(base64 < ${shell(name)} | tr -d '\\n')`;
  });
  const key = hasKey() ? ` -H "Authorization: Bearer $VLM_API_KEY"` : "";
  return `curl -N ${endpoint()} -H 'Content-Type: application/json'${key} -d @- <<END\n${filled}\nEND\n`;
}

export function asPython(body, names) {
  const [request, files] = withPlaces(body, names);
  const { messages, model, stream, stream_options, ...options } = request;
  const shown = python(messages, 4).replace(PLACE_QUOTED, (_, index) => {
    const { type, name } = files[index];
    return `data_url(${JSON.stringify(name)}, ${JSON.stringify(type)})`;
  });
  const rest = Object.entries(options).map(([name, value]) => `    ${name}=${python(value, 4)},\n`);
  const key = hasKey() ? `os.environ["VLM_API_KEY"]` : `"none"`;
  return `import base64
${hasKey() ? "import os\n" : ""}
import openai


def data_url(path, kind):
    with open(path, "rb") as file:
        return f"data:{kind};base64,{base64.b64encode(file.read()).decode()}"


client = openai.OpenAI(base_url="${new URL("v1", document.baseURI)}", api_key=${key})
answer = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=${shown},
${rest.join("")})
print(answer.choices[0].message.content)
`;
}

const PLACE = /@@media (\d+)@@/g;
const PLACE_QUOTED = /"@@media (\d+)@@"/g;

/** A copy of `body` with places for its media, and what belongs there. */
function withPlaces(body, names) {
  const files = [];
  const copy = JSON.parse(JSON.stringify(body), (name, value) => {
    if (!["url", "file_data"].includes(name) || typeof value !== "string" || !value.startsWith("data:")) return value;
    files.push({ type: value.slice(5, value.indexOf(";")), name: names[files.length] ?? "picture.png" });
    return `@@media ${files.length - 1}@@`;
  });
  return [copy, files];
}

const endpoint = () => new URL("v1/chat/completions", document.baseURI).href;
const shell = (name) => `'${name.replaceAll("'", `'\\''`)}'`;

function python(value, indent) {
  const names = { true: "True", false: "False", null: "None" };
  if (value === null || typeof value === "boolean") return names[value];
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const items = isList
    ? value.map((each) => python(each, indent + 4))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, indent + 4)}`);
  const [open, close] = isList ? "[]" : "{}";
  const line = open + items.join(", ") + close;
  if (line.length < 88 && !line.includes("\n")) return line;
  const pad = " ".repeat(indent);
  return `${open}\n${items.map((each) => `${pad}    ${each},\n`).join("")}${pad}${close}`;
}
