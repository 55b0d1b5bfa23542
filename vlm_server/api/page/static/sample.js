// For those who have no model of their own yet: a picture to begin with, with questions that the embedded model can
// answer, and a hint that this model is a toy.

import { later } from "./api.js";
import { $, h, keep, kept } from "./dom.js";

const PICTURE = new URL("./sample.png", import.meta.url).pathname;
const QUESTIONS = ["Describe the picture.", "How many blue squares are there?", "Where is the circle?", "What colour is the star?"];

/** Offers the picture; `ask(file, text)` is called with what is chosen. */
export function offerSample(ask) {
  const begin = async (text) => {
    const blob = await (await fetch(PICTURE)).blob();
    ask(new File([blob], "sample.png", { type: "image/png" }), text);
  };
  $("sample").append(
    h("img", { src: PICTURE, alt: "A drawing of a purple star, a red circle and two blue squares", width: 640, height: 400, loading: "lazy" }),
    h(
      "div",
      h("p", "No picture at hand? Ask about this one."),
      h("ul.chips", { "aria-label": "Questions about the sample" }, QUESTIONS.map((text) => h("li", h("button", { type: "button", onclick: () => begin(text) }, text)))),
    ),
  );
}

const TOY = "demo";
const DISMISSED = "vlm_server toy";
let isDismissed = false;

/** Shows the hint where the embedded model is all that is served, until it is dismissed. */
export function hintAtToy(models) {
  $("toy").hidden = isDismissed || models.length !== 1 || models[0].root !== TOY;
}

export function startHint() {
  isDismissed = kept(DISMISSED) !== null;
  $("toy-models").addEventListener("click", () => later("./models.js").then((module) => module?.showCatalog()));
  $("toy-close").addEventListener("click", () => {
    isDismissed = true;
    $("toy").hidden = true;
    $("question").focus();
    keep(DISMISSED, "yes");
  });
}
