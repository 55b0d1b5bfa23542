// Finds boxes and points in what a model wrote. Values are returned as fractions of the picture.
//
// Formats: Qwen's JSON and its <|box_start|> marks, Gemini's box_2d (y first), Molmo's points,
// arguments of tool calls with x and y, and an answer that is nothing but numbers.

const N = String.raw`\s*(-?\d+(?:\.\d+)?)\s*`;
const PAIR = `${N},${N}`;
const FOUR = `${PAIR},${PAIR}`;
const LABEL = /"(?:label|name|text_content)"\s*:\s*"([^"]*)"/;

/**
 * @param text what the model wrote, or the JSON of a call's arguments
 * @param seen {width, height}: the picture as the model saw it, or undefined
 * @param coordinates "pixels" of that size, or anything else for 0 to 1000
 * @returns [{kind: "box" | "point", x, y, width, height, label}]
 */
export function findRegions(text, seen, coordinates) {
  const across = coordinates === "pixels" && seen ? seen.width : 1000;
  const down = coordinates === "pixels" && seen ? seen.height : 1000;
  const found = [];
  const box = (x1, y1, x2, y2, label = "", w = across, h = down) => {
    const [left, right] = [x1 / w, x2 / w].sort((a, b) => a - b);
    const [top, bottom] = [y1 / h, y2 / h].sort((a, b) => a - b);
    found.push({ kind: "box", x: left, y: top, width: right - left, height: bottom - top, label });
  };
  const point = (x, y, label = "", w = across, h = down) =>
    found.push({ kind: "point", x: x / w, y: y / h, width: 0, height: 0, label });

  each(text, `"(?:bbox_2d|bbox|box)"\\s*:\\s*\\[${FOUR}\\]`, (m, label) => box(...numbers(m), label));
  each(text, `"box_2d"\\s*:\\s*\\[${FOUR}\\]`, (m, label) => {
    const [y1, x1, y2, x2] = numbers(m);
    box(x1, y1, x2, y2, label, 1000, 1000);
  });
  each(text, `<\\|?box(?:_start)?\\|?>\\s*\\(${PAIR}\\),\\(${PAIR}\\)`, (m) => box(...numbers(m)));
  each(text, `"(?:point_2d|point|coordinates?|position)"\\s*:\\s*\\[${PAIR}\\]`, (m, label) =>
    point(...numbers(m), label),
  );
  each(text, `"x"\\s*:${N},\\s*"y"\\s*:${N}[,}\\s]`, (m, label) => point(...numbers(m), label));
  each(text, `x\\d*="${N}"\\s+y\\d*="${N}"`, (m) => point(...numbers(m), "", 100, 100));
  if (!found.length) {
    const bare = text.trim().match(`^[([]{0,2}${PAIR}(?:,${PAIR})?[)\\]]{0,2}\\.?$`);
    if (bare) (bare[3] === undefined ? point : box)(...numbers(bare));
  }
  return found.filter((r) => r.x >= 0 && r.y >= 0 && r.x + r.width <= 1.01 && r.y + r.height <= 1.01);
}

/** Calls `use` with each match and the label of the JSON object that it stands in. */
function each(text, pattern, use) {
  for (const match of text.matchAll(new RegExp(pattern, "g"))) {
    const start = text.lastIndexOf("{", match.index);
    const end = text.indexOf("}", match.index);
    const around = start < 0 ? "" : text.slice(start, end < 0 ? undefined : end);
    use(match, around.match(LABEL)?.[1] ?? "");
  }
}

const numbers = (match) =>
  match
    .slice(1)
    .filter((value) => value !== undefined)
    .map(Number);
