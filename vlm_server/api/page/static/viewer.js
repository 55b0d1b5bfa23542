// A picture as large as the window: zoomed by wheel, fingers, keys and buttons, with marks, and positions in pixels.

import { copy, h, icon, iconButton } from "./dom.js";
import { marksOf, placesOf } from "./marked.js";

const MAX_SCALE = 32;
const STEP = 1.4;

export function view(picture, regions = []) {
  const viewer = new Viewer(picture, regions);
  document.body.append(viewer.dialog);
  viewer.dialog.showModal();
  viewer.fit();
  viewer.stage.focus();
}

class Viewer {
  constructor(picture, regions) {
    this.picture = picture;
    this.scale = this.fitted = 1;
    this.x = this.y = 0;
    this.fingers = new Map();
    this.layer = h("div.layer", h("img", { src: picture.url, alt: picture.name, draggable: "false" }), marksOf(regions));
    this.stage = h("div.viewer-stage", { tabindex: "0", role: "application", "aria-label": `${picture.name}: plus and minus zoom, arrows move, c copies the position` }, this.layer);
    this.position = h("output.position", "");
    this.zoom = h("output", "");
    const button = (name, label, act) => h("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick: act }, icon(name));
    const link = (label, act) => h("button", { type: "button", class: "link", onclick: act }, label);
    this.copier = iconButton("copy", "Copy position", () => this.copyPosition());
    this.dialog = h(
      "dialog.viewer",
      { "aria-label": `Picture ${picture.name}`, onclose: () => this.close() },
      h(
        "header",
        h("p.name", h("b", picture.name), h("span.muted", `${picture.width} × ${picture.height}`)),
        h(
          "div.adjust",
          h("p", button("minus", "Smaller", () => this.by(1 / STEP)), this.zoom, button("new", "Larger", () => this.by(STEP)),
            link("Fit", () => this.fit()), link("1:1", () => this.by(1 / this.scale))),
          h("p", this.position, this.copier),
        ),
        button("close", "Close", () => this.dialog.close()),
      ),
      this.stage,
      regions.length ? placesOf(regions, picture, this.layer) : null,
    );
    this.listen();
  }

  listen() {
    const { stage } = this;
    stage.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.by(STEP ** (-event.deltaY / 100), event);
    }, { passive: false });
    stage.addEventListener("dblclick", (event) => (this.scale > this.fitted * 1.1 ? this.fit() : this.by(4, event)));
    stage.addEventListener("pointerdown", (event) => {
      stage.setPointerCapture(event.pointerId);
      this.fingers.set(event.pointerId, event);
      this.showPosition((this.at = this.pixel(event)));
    });
    for (const name of ["pointerup", "pointercancel"])
      stage.addEventListener(name, (event) => this.fingers.delete(event.pointerId));
    stage.addEventListener("pointermove", (event) => this.moved(event));
    stage.addEventListener("keydown", (event) => this.key(event));
    this.resize = () => this.fit();
    addEventListener("resize", this.resize);
  }

  /** A drag, or with two fingers a pinch. */
  moved(event) {
    this.showPosition((this.at = this.pixel(event)));
    const before = this.fingers.get(event.pointerId);
    if (!before) return;
    const other = [...this.fingers.values()].find(({ pointerId }) => pointerId !== event.pointerId);
    if (other) {
      const apart = (one) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
      this.by(apart(event) / Math.max(apart(before), 1), { clientX: (event.clientX + other.clientX) / 2, clientY: (event.clientY + other.clientY) / 2 });
    } else {
      this.x += event.clientX - before.clientX;
      this.y += event.clientY - before.clientY;
      this.show();
    }
    this.fingers.set(event.pointerId, event);
  }

  key(event) {
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    const acts = { "+": () => this.by(STEP), "=": () => this.by(STEP), "-": () => this.by(1 / STEP), 0: () => this.fit(), 1: () => this.by(1 / this.scale), c: () => this.copyPosition() };
    const move = moves[event.key];
    if (event.ctrlKey || event.metaKey || (!move && !acts[event.key])) return;
    event.preventDefault();
    if (!move) return acts[event.key]();
    this.x += move[0];
    this.y += move[1];
    this.show();
  }

  /** The pixel of the picture below the pointer; null outside. */
  pixel({ clientX, clientY }) {
    const box = this.stage.getBoundingClientRect();
    const x = Math.floor((clientX - box.left - this.x) / this.scale);
    const y = Math.floor((clientY - box.top - this.y) / this.scale);
    const { width, height } = this.picture;
    return x >= 0 && y >= 0 && x < width && y < height ? [x, y] : null;
  }

  copyPosition() {
    const { width, height } = this.stage.getBoundingClientRect();
    const middle = [(width / 2 - this.x) / this.scale, (height / 2 - this.y) / this.scale].map(Math.round);
    this.showPosition(this.at ?? middle);
    copy(this.copier, (this.at ?? middle).join(", "));
  }

  showPosition(at) {
    this.position.textContent = at ? `x ${at[0]}, y ${at[1]}` : "";
  }

  fit() {
    const { clientWidth, clientHeight } = this.stage;
    const { width, height } = this.picture;
    this.scale = this.fitted = Math.min(clientWidth / width, clientHeight / height);
    this.x = (clientWidth - width * this.scale) / 2;
    this.y = (clientHeight - height * this.scale) / 2;
    this.show();
  }

  /** Zooms; what is at the pointer, or in the middle, stays there. */
  by(factor, at = null) {
    const box = this.stage.getBoundingClientRect();
    const [x, y] = at ? [at.clientX - box.left, at.clientY - box.top] : [box.width / 2, box.height / 2];
    const scale = Math.min(Math.max(this.scale * factor, this.fitted / 2), Math.max(MAX_SCALE, this.fitted));
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
    this.show();
  }

  show() {
    const { width, height } = this.picture;
    Object.assign(this.layer.style, { width: `${width * this.scale}px`, height: `${height * this.scale}px`, transform: `translate(${this.x}px, ${this.y}px)` });
    this.layer.classList.toggle("grainy", this.scale >= 4);
    this.zoom.textContent = `${Math.round(this.scale * 100)} %`;
  }

  close() {
    removeEventListener("resize", this.resize);
    this.dialog.remove();
  }
}
