// Parts an answer's text where the model wrote marks of its own that the server could not read: broken or unfinished
// tool calls, stray reasoning, marks of turns. A person sees what they are, folded, and never the marks in a sentence.

import { h } from "./dom.js";

/** [kind, start, end]. A call without an end ends with the next one or with the answer. */
const MARKS = [
  ["call", "<tool_call>", "</tool_call>"],
  ["call", "]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"],
  ["call", "<minimax:tool_call>", "</minimax:tool_call>"],
  ["call", "<longcat_tool_call>", "</longcat_tool_call>"],
  ["call", "<atem:function_calls>", "</atem:function_calls>"],
  ["call", "<|tool_call>", "<tool_call|>"],
  ["call", "<|tool_call_start|>", "<|tool_call_end|>"],
  ["call", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
  ["call", "<|START_ACTION|>", "<|END_ACTION|>"],
  ["call", "<function_call>", "</function_call>"],
  ["call", "<function=", "</function>"],
  ["call", "<function name=", "</function>"],
  ["call", "[TOOL_CALLS]", ""],
  ["thoughts", "<think>", "</think>"],
  ["thoughts", "<mm:think>", "</mm:think>"],
  ["thoughts", "<seed:think>", "</seed:think>"],
  ["thoughts", "[THINK]", "[/THINK]"],
  ["thoughts", "◁think▷", "◁/think▷"],
  ["thoughts", "<|START_THINKING|>", "<|END_THINKING|>"],
];
const quoted = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
const STARTS = MARKS.map(([, start]) => start);
const ENDS = MARKS.map(([, , end]) => end).filter(Boolean);
/** A fence with its code, code in a line, or a mark. What is in code is what the answer is about. */
const FOUND = new RegExp(
  String.raw`(?:^|\n) *(${"`{3,}(?![^\\n]*`)|~{3,}"})[^]*?(?:\n *\1|$)|(?<!${"`"})(${"`+"})(?!${"`"})[^\n]*?\2(?!${"`"})|` +
    `(${STARTS.map(quoted).join("|")})|(${ENDS.map(quoted).join("|")})|` +
    String.raw`<\|?(?:end|start)_of_turn\|?>|<\|\w+\|>`,
  "g",
);
const LONGEST = Math.max(...STARTS.map(({ length }) => length));

/** The pieces of `text`: {kind: "text" | "call" | "thoughts", text, state: "whole" | "open" | "unfinished"}. Of text that
 * is not whole, the beginning of a mark at the end is left out. Marks that stand alone are left out, too. */
export function piecesOf(text, isWhole) {
  const pieces = [];
  const add = (kind, piece, state = "whole") => {
    if (kind === "text" && pieces.at(-1)?.kind === "text") pieces.at(-1).text += piece;
    else if (kind !== "text" || piece.trim()) pieces.push({ kind, text: piece, state });
  };
  let at = 0;
  for (FOUND.lastIndex = 0; ; ) {
    const match = FOUND.exec(text);
    if (!match) break;
    const [found, fence, code, start, end] = match;
    if (fence || code) continue;
    if (end && MARKS.some(([kind, , its]) => kind === "thoughts" && its === end) && !pieces.some(({ kind }) => kind === "thoughts")) {
      pieces.length = 0; // what was written before was thought, too
      add("thoughts", text.slice(0, match.index).trim());
    } else add("text", text.slice(at, match.index));
    at = FOUND.lastIndex;
    if (!start) continue;
    const [kind, , its] = MARKS.find(([, one]) => one === start);
    const { body, next, isClosed } = bodyOf(text, at, its, isWhole && kind === "call");
    const isOver = isWhole || next < text.length;
    const state = isClosed || (isOver && !its) ? "whole" : isOver ? "unfinished" : "open";
    add(kind, (start.endsWith("=") ? start : "") + body, state);
    FOUND.lastIndex = at = next;
  }
  add("text", isWhole ? text.slice(at) : withoutBeginning(text.slice(at)));
  return pieces;
}

/** What stands between a start mark and its `end`: up to the next start if it has none, or to an empty line if `isLost`. */
function bodyOf(text, from, end, isLost) {
  const close = end ? text.indexOf(end, from) : -1;
  if (close >= 0) return { body: text.slice(from, close).trim(), next: close + end.length, isClosed: true };
  const stops = [...STARTS, ...(isLost ? ["\n\n"] : [])].map((stop) => text.indexOf(stop, from)).filter((one) => one > from);
  const next = Math.min(...stops, text.length);
  return { body: text.slice(from, next).trim(), next, isClosed: false };
}

function withoutBeginning(text) {
  for (let length = Math.min(LONGEST, text.length); length > 0; length--) {
    const tail = text.slice(-length);
    if ([...STARTS, ...ENDS].some((mark) => mark.length > length && mark.startsWith(tail))) return text.slice(0, -length);
  }
  return text;
}

/** What a piece that is no text is, folded. `shown`, the element of the same piece before, is used again. */
export function folded({ kind, text, state }, shown) {
  const element = shown?.matches?.("details.unread") ? shown : h("details.unread", h("summary"), h("p"), h("pre", { tabindex: "0" }, h("code")));
  const [summary, about, code] = element.children;
  const [title, more] = kind === "call" ? callWords(text, state) : [state === "open" ? "Thinking…" : "Thoughts", ""];
  const name = kind === "call" && text.match(NAME);
  summary.replaceChildren(title, ...(name ? [" ", h("code", name[1] ?? name[2])] : []));
  about.textContent = more;
  code.setAttribute("aria-label", title);
  code.firstChild.textContent = text;
  return element;
}

const NAME = /"name"\s*:\s*"([\w.-]{1,64})"|^<function(?:=| name=)"?([\w.-]{1,64})/;

function callWords(text, state) {
  if (state === "open") return ["Writing a tool call…", ""];
  if (state === "unfinished") return ["Unfinished tool call", "It was not finished, so nothing was called."];
  return isJson(text)
    ? ["Tool call that was not made", "No tool of this name was offered with the question."]
    : ["Tool call that couldn’t be read", "The model wrote it in no form that can be read, so nothing was called."];
}

/** Whether a text is nothing but an object or a list. */
export function isJson(text) {
  if (!/^\s*[[{]/.test(text)) return false;
  try {
    return typeof JSON.parse(text) === "object";
  } catch {
    return false;
  }
}
