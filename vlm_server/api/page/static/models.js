// The models that are served, and what is known of each.

import { get } from "./api.js";
import { $, bytes, count, empty, h, short, words } from "./dom.js";

export async function showModels() {
  try {
    const { data } = await get("v1/models");
    $("models").replaceChildren(h("div", { class: "cards one" }, data.map(card)));
  } catch (error) {
    $("models").replaceChildren(empty("The models can’t be shown", error.message));
  }
}

function card(model) {
  if (!model.family)
    return h(
      "section",
      { class: "card model" },
      h("header", {}, h("h2", {}, model.id), h("p", {}, "Loading")),
      empty("Not loaded yet", "More is known once the model was ready for the first time."),
      actions(model),
    );
  return h(
    "section",
    { class: "card model" },
    h("header", {}, h("h2", {}, model.id), h("p", {}, model.state ? words(model.state) : "Loaded")),
    h(
      "ul",
      { class: "chips", "aria-label": "What it can do" },
      model.capabilities.map((name) => h("li", {}, CAN[name] ?? words(name))),
    ),
    h(
      "dl",
      { class: "grid" },
      facts(model).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    ),
    actions(model),
  );
}

const CAN = {
  completion: "Text",
  vision: "Pictures",
  video: "Videos",
  tools: "Tools",
  thinking: "Thinking",
  structured_output: "JSON by schema",
};
const POINTS = { pixels: "pixels of the picture as seen", thousandths: "0 to 1000 on both axes" };

function facts({
  family,
  num_parameters: parameters,
  quantization,
  max_model_len: context,
  coordinates,
  image_limits: limits,
}) {
  const shown = [
    ["Family", family],
    ["Parameters", short(parameters)],
    ["Weights", quantization],
    ["Context", `${count(context)} tokens`],
    ["Coordinates", POINTS[coordinates] ?? "see its model card"],
    ["Pictures in a request", `up to ${count(limits.max_images)}`],
    ["A picture’s file", `up to ${bytes(limits.max_image_bytes)}`],
    ["A picture’s size", `up to ${count(limits.max_image_pixels / 1e6)} megapixels`],
  ];
  const { seen } = limits;
  if (seen)
    shown.push([
      "Seen as",
      `${short(seen.min_pixels)} to ${short(seen.max_pixels)} pixels, sides multiples of ${seen.side_multiple}`,
    ]);
  return shown;
}

/** Buttons for what can be done with a model. One that is always loaded has none. */
function actions() {
  return h("div", { class: "actions" });
}
