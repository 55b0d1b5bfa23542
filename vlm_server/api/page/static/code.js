// A block of code: its language, a button that copies it, and its colours once it is whole.

import { load } from "./api.js";
import { copy, h } from "./dom.js";

const MAX_CHARACTERS = 100_000;
const LANGUAGES = {
  bash: "bash", sh: "bash", shell: "bash", zsh: "bash", console: "bash",
  c: "cpp", "c++": "cpp", cc: "cpp", cpp: "cpp", h: "cpp", hpp: "cpp",
  css: "css", diff: "diff", patch: "diff", go: "go", golang: "go",
  html: "xml", svg: "xml", xml: "xml", ini: "ini", toml: "ini", java: "java",
  javascript: "javascript", js: "javascript", jsx: "javascript", mjs: "javascript",
  json: "json", jsonc: "json", markdown: "markdown", md: "markdown",
  py: "python", python: "python", rs: "rust", rust: "rust", sql: "sql", swift: "swift",
  ts: "typescript", tsx: "typescript", typescript: "typescript", yaml: "yaml", yml: "yaml",
};

export function codeBlock(text, language, isComplete) {
  const code = h("code", text);
  const button = h("button", { type: "button", class: "link", onclick: () => copy(button, text) }, "Copy");
  if (isComplete && text.length <= MAX_CHARACTERS) colour(code, text, LANGUAGES[language.toLowerCase()]);
  return h(
    "figure.code",
    { "data-language": language },
    h("figcaption", h("span", language || "Text"), button),
    h("pre", { tabindex: "0", "aria-label": language ? `Code in ${language}` : "Code" }, code),
  );
}

let highlighter = null;

/** Colours `code` if its language is known; without colours it is as good. */
async function colour(code, text, language) {
  if (!language) return;
  try {
    highlighter ??= load("./vendor/highlight.min.js").then((module) => module.default);
    const known = await highlighter;
    if (!known.getLanguage(language))
      known.registerLanguage(language, (await load(`./vendor/languages/${language}.min.js`)).default);
    const { _emitter: emitter } = known.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(...emitter.rootNode.children.map(coloured));
  } catch {
    highlighter = null;
  }
}

/** A node of the tree that the highlighter makes: a text, or {scope, children}. */
function coloured(node) {
  if (typeof node === "string") return node;
  const kind = String(node.scope ?? "").split(".")[0];
  return h("span", { class: kind && `c-${kind}` }, node.children.map(coloured));
}
