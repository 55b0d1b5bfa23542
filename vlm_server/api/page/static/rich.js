// Shows the little Markdown of one line: `code` and **bold**.

import { h } from "./dom.js";

export function inline(text) {
  return text.split(/(\*\*[^*]+\*\*|`[^`]+`)/).map((piece) => {
    if (piece.length > 4 && piece.startsWith("**")) return h("strong", piece.slice(2, -2));
    if (piece.length > 2 && piece.startsWith("`")) return h("code", piece.slice(1, -1));
    return piece;
  });
}
