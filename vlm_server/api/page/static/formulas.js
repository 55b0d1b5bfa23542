// Mathematics in an answer: `$…$` and `\(…\)` in a line, `$$…$$` and `\[…\]` apart, as MathML.

import { load } from "./api.js";
import { h } from "./dom.js";

const MAX_CHARACTERS = 4_000;
const OPTIONS = { trust: false, strict: false, throwOnError: true, maxExpand: 500, maxSize: [20, 50] };

let temml = null;
let loading = null;

/** Teaches the parser the marks of formulas. */
export function addMath(parser) {
  parser.inline.ruler.before("escape", "math_inline", inlineRule);
  parser.block.ruler.before("fence", "math_block", blockRule, {
    alt: ["paragraph", "reference", "blockquote", "list"],
  });
}

/** The formula; what was written, until it is whole or if it can't be read. */
export function mathElement(tex, isBlock, isComplete) {
  const made = h(isBlock ? "div.formula" : "span.formula", { title: tex }, tex);
  if (isComplete && tex.length <= MAX_CHARACTERS) draw(made, tex, isBlock);
  return made;
}

async function draw(made, tex, displayMode) {
  try {
    if (!temml) {
      loading ??= load("./vendor/temml.min.js");
      temml = (await loading).default;
    }
    const drawn = h("span");
    temml.render(tex, drawn, { ...OPTIONS, displayMode });
    made.replaceChildren(...drawn.childNodes);
  } catch {
    loading = temml ? loading : null;
    made.classList.add("unread");
  }
}

const INLINE = [
  ["$$", "$$"],
  ["\\[", "\\]"],
  ["\\(", "\\)"],
  ["$", "$"],
];

function inlineRule(state, isSilent) {
  const { src, pos, posMax } = state;
  const marks = INLINE.find(([open]) => src.startsWith(open, pos));
  if (!marks) return false;
  const start = pos + marks[0].length;
  const end = src.indexOf(marks[1], start);
  if (end < 0 || end + marks[1].length > posMax) return false;
  const tex = src.slice(start, end);
  // a price is no formula: "$5 and $10"
  if (!tex.trim() || (marks[0] === "$" && (/^\s|\s$|\n\n/.test(tex) || /\d/.test(src[end + 1] ?? "")))) return false;
  if (!isSilent) state.push("math_inline", "math", 0).content = tex.trim();
  state.pos = end + marks[1].length;
  return true;
}

function blockRule(state, startLine, endLine, isSilent) {
  const first = state.src.slice(state.bMarks[startLine] + state.tShift[startLine], state.eMarks[startLine]);
  const marks = INLINE.slice(0, 2).find(([open]) => first.startsWith(open));
  if (!marks || state.sCount[startLine] - state.blkIndent >= 4) return false;
  const taken = [];
  for (let line = startLine; line < endLine; line++) {
    const start = state.bMarks[line] + state.tShift[line] + (line === startLine ? marks[0].length : 0);
    const text = state.src.slice(start, state.eMarks[line]);
    const end = text.indexOf(marks[1]);
    if (line > startLine && state.sCount[line] < state.blkIndent) return false;
    taken.push(end < 0 ? text : text.slice(0, end));
    if (end < 0) continue;
    if (text.slice(end + marks[1].length).trim()) return false;
    if (!isSilent) {
      state.line = line + 1;
      const token = state.push("math_block", "math", 0);
      token.content = taken.join("\n").trim();
      token.map = [startLine, state.line];
    }
    return true;
  }
  return false;
}
