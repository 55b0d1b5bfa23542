// Shows the little Markdown that models write: paragraphs, lists, headings, code, bold.

import { h } from "./dom.js";

/** The elements for `text`; also while it is still being written. */
export function rich(text) {
  const made = [];
  const lines = text.split("\n");
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    if (line.startsWith("```")) {
      const end = lines.findIndex((each, j) => j > i && each.startsWith("```"));
      const code = lines.slice(i + 1, end < 0 ? undefined : end).join("\n");
      made.push(h("pre", { tabindex: "0", "aria-label": "Code" }, h("code", code)));
      i = end < 0 ? lines.length : end + 1;
    } else if (/^#{1,6} /.test(line)) {
      made.push(h("p.heading", inline(line.replace(/^#+ /, ""))));
      i++;
    } else if (ITEM.test(line)) {
      const items = take(lines, i, (each) => ITEM.test(each));
      const tag = /^\s*\d/.test(line) ? "ol" : "ul";
      made.push(
        h(
          tag,
          {},
          items.map((each) => h("li", inline(each.replace(ITEM, "")))),
        ),
      );
      i += items.length;
    } else if (!line.trim()) {
      i++;
    } else {
      const part = take(lines, i, (each) => each.trim() && !/^(```|#{1,6} )/.test(each) && !ITEM.test(each));
      made.push(h("p", inline(part.join("\n"))));
      i += part.length;
    }
  }
  return made;
}

const ITEM = /^\s*(?:[-*•]|\d{1,3}[.)])\s+/;

function take(lines, start, isPart) {
  let end = start + 1;
  while (end < lines.length && isPart(lines[end])) end++;
  return lines.slice(start, end);
}

/** `code` and **bold** within a line. */
export function inline(text) {
  return text.split(/(\*\*[^*]+\*\*|`[^`]+`)/).map((piece) => {
    if (piece.length > 4 && piece.startsWith("**")) return h("strong", piece.slice(2, -2));
    if (piece.length > 2 && piece.startsWith("`")) return h("code", piece.slice(1, -1));
    return piece;
  });
}
