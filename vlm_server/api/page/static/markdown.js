// Shows Markdown while it is written. A parser makes tokens, and these become elements one by one: no HTML is parsed,
// links leave this server alone unless they are followed, and pictures in an answer are links too.

import { later } from "./api.js";
import { codeBlock } from "./code.js";
import { h } from "./dom.js";
import { addMath, mathElement } from "./formulas.js";
import { folded, piecesOf } from "./markup.js";

const MAX_ELEMENTS = 20_000;
const MAX_LEVEL = 24; // of elements in elements: the parser leaves out what is deeper than 100
const TAGS = new Set(
  "p ul ol li blockquote table thead tbody tr th td hr br em strong s h1 h2 h3 h4 h5 h6".split(" "),
);

let parser = null;
let loading = null;

/** Loads the parser, once; until it can be had, answers are plain text. */
export function loadMarkdown() {
  loading ??= later("./vendor/markdown-it.min.js").then((module) => {
    if (!module) return (loading = null);
    parser = globalThis.markdownit({ html: false, linkify: true, breaks: true });
    parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
    parser.validateLink = (url) => /^(https?:\/\/|mailto:)/i.test(url);
    addMath(parser);
  });
  return loading;
}

/** Shows `text` in `element`, whose blocks stay where they do not change. `isWhole` once nothing follows. */
export function showMarkdown(element, text, isWhole) {
  const pieces = piecesOf(text, isWhole);
  if (!parser) {
    element.replaceChildren(...pieces.map((piece) => (piece.kind === "text" ? h("p", piece.text) : folded(piece))));
    if (text && !element.dataset.waits) {
      element.dataset.waits = "yes";
      loadMarkdown().then(() => {
        delete element.dataset.waits;
        if (parser && element.latest) showMarkdown(element, ...element.latest);
      });
    }
    element.latest = [text, isWhole];
    return;
  }
  element.latest = null;
  const blocks = pieces.flatMap((piece) => (piece.kind === "text" ? blocksOf(piece.text) : [{ piece, source: JSON.stringify(piece) }]));
  const shown = [...element.children];
  const last = blocks.length - 1;
  let same = 0;
  const key = (block, index) => `${index === last && !isWhole ? "open " : ""}${block.source}`;
  while (same < blocks.length && shown[same]?.source === key(blocks[same], same)) same++;
  const open = blocks[same]?.piece && shown[same]; // it may be unfolded
  for (const old of shown.slice(same)) old.remove();
  const room = { left: MAX_ELEMENTS - element.getElementsByTagName("*").length, level: 2 };
  for (let index = same; index < blocks.length; index++) {
    const { piece } = blocks[index];
    const made = piece ? folded(piece, index === same && open) : build(blocks[index], room, index < last || isWhole);
    made.source = key(blocks[index], index);
    element.append(made);
  }
}

/** The blocks of `text` that stand in no other: {tokens, source}. */
function blocksOf(text) {
  const lines = text.split("\n");
  const blocks = [];
  let begun = null;
  for (const token of parser.parse(text, {})) {
    begun ??= { tokens: [], source: "" };
    begun.tokens.push(token);
    if (token.map && !begun.source) begun.source = lines.slice(...token.map).join("\n");
    if (token.level === 0 && token.nesting <= 0) {
      blocks.push(begun);
      begun = null;
    }
  }
  return blocks;
}

/** The element of a block; as it was written, if it has too many elements for one answer. */
function build({ tokens, source }, room, isComplete) {
  const box = h("div");
  try {
    if (tokens.some((token) => token.level > MAX_LEVEL)) throw FULL;
    fill(box, tokens, room, isComplete);
  } catch (error) {
    if (error !== FULL) throw error;
    box.replaceChildren(h("pre", { tabindex: "0", "aria-label": "Too much to arrange" }, h("code", source)));
  }
  const only = box.children.length === 1 && box.firstElementChild;
  if (only?.localName === "table")
    return h("div.scroll", { tabindex: "0", role: "region", "aria-label": "Table" }, only);
  return only || box;
}

const FULL = new Error("too many elements");

function fill(box, tokens, room, isComplete) {
  const open = [box];
  for (const token of tokens) {
    if (room.left-- <= 0) throw FULL;
    const parent = open.at(-1);
    if (token.nesting < 0) {
      if (open.length > 1) open.pop();
    } else if (token.type === "inline") {
      if (open.some((one) => one.localName === "li")) showTask(token.children[0]);
      fill(parent, token.children, room, isComplete);
    } else if (token.nesting > 0) {
      const made = opened(token, room);
      parent.append(made);
      open.push(token.hidden ? (made.remove(), parent) : made);
    } else parent.append(leaf(token, isComplete));
  }
}

/** `[x]` at the start of an item is a box. */
function showTask(first) {
  if (first?.type === "text") first.content = first.content.replace(/^\[( |x)\] /i, (_, done) => (done === " " ? "☐ " : "☑ "));
}

function opened(token, room) {
  if (token.type === "link_open") return link(token.attrGet("href"));
  if (!TAGS.has(token.tag)) return h("span");
  if (token.type === "heading_open") {
    room.level = Math.min(room.level + 1, Number(token.tag[1]) + 2, 6); // below the heading of the answer
    return h(`h${room.level}.heading`, { "data-level": token.tag[1] });
  }
  const made = h(token.tag, { start: token.attrGet("start") });
  const align = token.attrGet("style")?.match(/text-align:(\w+)/)?.[1];
  if (align) made.style.textAlign = align;
  return made;
}

/** A link that says where it leads; what may not be followed is no link. */
function link(href) {
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href });
}

function leaf(token, isComplete) {
  switch (token.type) {
    case "text":
      return token.content;
    case "softbreak":
      return "\n";
    case "hardbreak":
      return h("br");
    case "hr":
      return h("hr");
    case "code_inline":
      return h("code", token.content);
    case "fence":
    case "code_block":
      return codeBlock(token.content, token.info.trim().split(/\s/)[0], isComplete);
    case "math_inline":
    case "math_block":
      return mathElement(token.content, token.type === "math_block", isComplete);
    case "image": {
      const made = link(token.attrGet("src"));
      made.append(`Picture: ${token.content || token.attrGet("src")}`);
      return made;
    }
    default:
      return token.content;
  }
}
