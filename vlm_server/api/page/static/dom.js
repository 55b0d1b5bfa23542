// Makes elements, and shows numbers. Never parses HTML: all text stays text.

const SVG = "http://www.w3.org/2000/svg";

/** An element, as in `h("p.note", {id: "x"}, "text")`: a tag with classes, attributes
 * (functions are listeners, false and null are left out), and children. */
export function h(tag, ...rest) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  element.classList.add(...classes);
  return fill(element, rest[0]?.constructor === Object ? rest.shift() : {}, rest);
}

/** A list of terms and values; a third one says more, where a mouse rests or as the style has it. */
export const pairs = (name, list) =>
  h(
    `dl.${name}`,
    list.map(([term, value, title]) => h("div", { title }, h("dt", term), h("dd", value, title && h("span.why", title)))),
  );

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function icon(name) {
  return svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (value !== null && value !== false && value !== undefined)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => (child ?? false) !== false));
  return element;
}

export const $ = (id) => document.getElementById(id);

const whole = new Intl.NumberFormat("en");

export const count = (value) => whole.format(Math.round(value));

export function short(value) {
  for (const [size, unit] of [
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "k"],
  ])
    if (value >= size) return `${digits(value / size)} ${unit}`;
  return String(value);
}

/** Sizes as vlm_server/sizes.py has them: memory, and limits that settings have in GiB; and files, as hubs count them. */
export const memorySize = (value) => size(value, 1024, ["bytes", "KiB", "MiB", "GiB", "TiB"]);
export const fileSize = (value) => size(value, 1000, ["bytes", "kB", "MB", "GB", "TB"]);

function size(value, base, units) {
  let power = 0;
  for (; value >= base && power < units.length - 1; power++) value /= base;
  const places = power < 3 ? 0 : Math.max(0, 3 - value.toFixed(0).length);
  return `${value.toFixed(places)} ${units[power]}`;
}

export function seconds(value) {
  if (value < 1e-4) return `${digits(value * 1e6)} µs`;
  if (value < 1) return `${digits(value * 1000)} ms`;
  if (value < 120) return `${digits(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${digits(value / 3600)} h`;
}

/** The time of day of `date`, in a `time` element. */
export const clock = (date) =>
  h(
    "time.muted",
    { datetime: date.toISOString(), title: date.toLocaleString() },
    date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" }),
  );

export const percent = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "–");

export const words = (name) => name.replaceAll("_", " ");

const digits = (value) => (value >= 100 ? Math.round(value) : +value.toPrecision(value >= 10 ? 3 : 2));

/** A button that is an icon, with a name; a mouse that rests on it is told `tip`. */
export const iconButton = (image, name, onclick, tip = name) =>
  h("button.icon.act", { type: "button", title: tip, onclick }, icon(image), h("span.hidden", name));

/** Copies `text` and says so on `button`, which may be an icon, for a moment, and to screen readers. */
export async function copy(button, text) {
  const name = button.querySelector(".hidden") ?? button;
  const image = button.querySelector("use");
  const usual = (button.usual ??= [name.textContent, image?.getAttribute("href")]);
  const show = (label, href, said = "") => {
    name.textContent = label;
    $("said").textContent = said;
    image?.setAttribute("href", href);
  };
  (await toClipboard(text)) ? show("Copied", "#i-done", "Copied") : show("Could not copy", "#i-close", "Could not copy");
  clearTimeout(button.timer);
  button.timer = setTimeout(show, 1600, ...usual);
}

/** Whether `text` is on the clipboard now. Pages at other addresses than localhost have no `clipboard`. */
async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const box = h("textarea", { class: "hidden", "aria-hidden": "true", tabindex: "-1" }, text);
    (document.querySelector("dialog[open]") ?? document.body).append(box);
    const focused = document.activeElement;
    box.select();
    const isCopied = document.execCommand("copy");
    box.remove();
    focused?.focus();
    return isCopied;
  }
}

/** What this browser keeps under `key`; null if there is nothing, or it keeps nothing for this page. */
export function kept(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

/** Keeps `value` in this browser; null or "" forgets it. */
export function keep(key, value) {
  try {
    value ? localStorage.setItem(key, value) : localStorage.removeItem(key);
  } catch {
    // it holds until the page is left
  }
}

/** Gives the reader a file. */
export function save(name, blob) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A small button, of what `name` names. One that `waits` does nothing, but keeps the focus. */
export function button(id, label, name, act, { waits, ...more } = {}) {
  return h(
    "button",
    {
      class: "quiet small",
      "data-id": `${id} ${name}`,
      "aria-label": `${label}: ${name}`,
      "aria-disabled": waits ? "true" : null,
      onclick: () => waits || act(),
      ...more,
    },
    label,
  );
}

/** An empty state: what there is not, and what would bring it about. */
export const empty = (title, text) => h("div.empty", h("p", title), text && h("p", inline(text)));

/** The little Markdown of one line, as messages of the server have it: `code` and **bold**. */
export function inline(text) {
  return text.split(/(\*\*[^*]+\*\*|`[^`]+`)/).map((piece) => {
    if (piece.length > 4 && piece.startsWith("**")) return h("strong", piece.slice(2, -2));
    if (piece.length > 2 && piece.startsWith("`")) return h("code", piece.slice(1, -1));
    return piece;
  });
}

/** Fills `element` anew, and keeps the focus. Not while it is pressed: a button that is replaced then
 * is never clicked. Returns whether it did. */
export function refill(element, children) {
  if (element.matches(":active")) return false;
  const focused = element.contains(document.activeElement) && document.activeElement.dataset.id;
  element.replaceChildren(...children.filter(Boolean));
  if (focused) element.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  return true;
}

/** Returns what calls `refresh` now and then again, after the milliseconds that it gives, as long as
 * the view with `id` is seen. */
export function whileSeen(id, refresh) {
  let timer = null;
  let latest = 0;
  const isSeen = () => !document.hidden && !$(id).closest(".view").hidden;
  const look = async () => {
    const mine = ++latest;
    clearTimeout(timer);
    const pause = isSeen() && (await refresh());
    if (pause && mine === latest) timer = setTimeout(look, pause);
  };
  document.addEventListener("visibilitychange", look);
  return look;
}
