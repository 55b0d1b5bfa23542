// A picture with numbered boxes and points, and beside it what they mark.

import { later } from "./api.js";
import { copy, h } from "./dom.js";

const share = (value) => `${100 * value}%`;

/** Boxes and points for a layer over the picture: positions are set as properties, which the policy allows. */
export function marksOf(regions) {
  return regions.map(({ kind, x, y, width, height }, index) => {
    const mark = h("span", { class: `mark ${kind}`, "data-mark": index }, h("span", String(index + 1)));
    Object.assign(mark.style, { left: share(x), top: share(y) });
    if (kind === "box") Object.assign(mark.style, { width: share(width), height: share(height) });
    return mark;
  });
}

/** The place of a region in pixels of the picture. */
export function placeOf({ kind, x, y, width, height }, picture) {
  const [left, top] = [Math.round(x * picture.width), Math.round(y * picture.height)];
  if (kind === "point") return `${left}, ${top}`;
  return `${left}, ${top}, ${Math.round((x + width) * picture.width)}, ${Math.round((y + height) * picture.height)}`;
}

/** The list of what is marked. The mark of the one that is pointed at stands out in `layer`. */
export function placesOf(regions, picture, layer) {
  const light = (index) => {
    for (const mark of layer.querySelectorAll(".mark")) mark.classList.toggle("lit", mark.dataset.mark === String(index));
  };
  return h(
    "ol.places",
    { "aria-label": "Marked in the picture" },
    regions.map((region, index) => {
      const place = placeOf(region, picture);
      const button = h("button", { type: "button", class: "link", onclick: () => copy(button, place) }, "Copy");
      const on = { onmouseenter: () => light(index), onmouseleave: () => light(-1), onfocusin: () => light(index), onfocusout: () => light(-1) };
      return h(
        "li",
        on,
        h("span.number", String(index + 1)),
        h("span", h("b", region.label || (region.kind === "box" ? "Box" : "Point")), h("code", place)),
        button,
      );
    }),
  );
}

export function marked(picture, regions) {
  const layer = h("div.layer", h("img", { src: picture.url, alt: `Your picture with ${regions.length} marks` }), marksOf(regions));
  return h(
    "figure.marked",
    h("button", { type: "button", class: "zoom", "aria-label": "Enlarge the picture", onclick: () => enlarge(picture, regions) }, layer),
    placesOf(regions, picture, layer),
  );
}

/** Shows a picture as large as the window; the code for it is loaded then. */
export const enlarge = async (picture, regions = []) => (await later("./viewer.js"))?.view(picture, regions);
