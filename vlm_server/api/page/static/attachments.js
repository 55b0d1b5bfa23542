// Pictures, clips and documents on their way to the server: what can't be sent as it is, is made so that it can.

import { ask } from "./api.js";
import { h, inline } from "./dom.js";

const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const VIDEOS = ["video/mp4", "video/webm"];
const DOCUMENTS = ["application/pdf"];
const MAX_SIDE = 4096;
const NUM_FRAMES = 6;
const FRAME_HEIGHT = 120;
const NUM_PAGES = 6; // of a document that are shown
const PAGE_PIXELS = 60_000;

export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((one) => one.toString(36)).join("");

/** A medium of a conversation, with its `blob` and `url`. Throws an Error that says what is wrong. */
export async function attachment(file, limits) {
  if (VIDEOS.includes(file.type)) return made(file, file, "video");
  if (DOCUMENTS.includes(file.type)) return made(file, file, "document");
  if (!file.type.startsWith("image/"))
    throw new Error(`${name(file)} is no picture, video or PDF that can be sent.`);
  const size = await sizeOf(file);
  const isLarge =
    limits && (file.size > limits.max_image_bytes || size.width * size.height > limits.max_image_pixels);
  if (IMAGES.includes(file.type) && !isLarge) return { ...made(file, file, "image"), ...size };
  const drawn = await redrawn(file, size);
  return { ...made(file, drawn.blob, "image"), width: drawn.width, height: drawn.height };
}

export const isMedia = (file) => file.type.startsWith("image/") || [...VIDEOS, ...DOCUMENTS].includes(file.type);

const made = (file, blob, kind) => ({ id: newId(), name: name(file), kind, type: blob.type, bytes: blob.size, ...withUrl(blob) });

/** What a medium has while it is shown. */
export const withUrl = (blob) => ({ blob, url: URL.createObjectURL(blob) });

const name = (file) => file.name || "pasted picture";

export function dataUrl({ blob }) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The file can’t be read."));
    reader.readAsDataURL(blob);
  });
}

async function sizeOf(file) {
  const bitmap = await decoded(file);
  const { width, height } = bitmap;
  bitmap.close();
  return { width, height };
}

async function decoded(file) {
  try {
    return await createImageBitmap(file);
  } catch {
    throw new Error(`${name(file)} can’t be read as a picture.`);
  }
}

/** As PNG or, if it has to be smaller, as JPEG. */
async function redrawn(file, { width, height }) {
  const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
  const bitmap = await decoded(file);
  const type = scale < 1 || file.type === "image/jpeg" ? "image/jpeg" : "image/png";
  const blob = await picture(bitmap, Math.round(width * scale), Math.round(height * scale), type);
  bitmap.close();
  return { blob, width: Math.round(width * scale), height: Math.round(height * scale) };
}

/** What `source` shows, as a file. */
export function picture(source, width, height, type = "image/png") {
  const canvas = h("canvas", { width, height });
  canvas.getContext("2d").drawImage(source, 0, 0, width, height);
  return new Promise((resolve) => canvas.toBlob(resolve, type, 0.92));
}

/** Fills `strip` with frames of a clip, evenly spaced; it stays as it is if the browser can't show the clip. */
export async function drawFrames(strip, { url }) {
  const video = h("video", { src: url, muted: true, preload: "auto", playsinline: true });
  try {
    await happened(video, "loadeddata");
    const seconds = Number.isFinite(video.duration) ? video.duration : 0;
    const frames = [];
    for (let index = 0; index < NUM_FRAMES; index++) {
      const at = (seconds * (index + 0.5)) / NUM_FRAMES;
      video.currentTime = at;
      await happened(video, "seeked");
      const width = Math.round((FRAME_HEIGHT * video.videoWidth) / video.videoHeight);
      const canvas = h("canvas", { width, height: FRAME_HEIGHT, title: `${at.toFixed(1)} s` });
      canvas.getContext("2d").drawImage(video, 0, 0, width, FRAME_HEIGHT);
      frames.push(canvas);
    }
    strip.replaceChildren(...frames);
  } catch {
    // a format that this browser does not know, and the server may
  }
  video.removeAttribute("src");
  video.load();
}

function happened(target, event) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`no ${event}`)), 5000);
    target.addEventListener("error", () => reject(new Error("unreadable")), { once: true });
    target.addEventListener(event, () => (clearTimeout(timer), resolve()), { once: true });
  });
}

/** The first of a document's pages that are asked about, drawn by the server: {total, pages: [{page, width, height, url}]}. */
async function firstPages({ blob, pages: chosen }) {
  const draw = async (pages) =>
    (await ask(`v1/documents/pages?pages=${pages}&max_pixels=${PAGE_PIXELS}`, { body: blob, isLook: true, quiet: true })).json();
  const { num_pages: total, pages } = await draw(encodeURIComponent(chosen || 1));
  if (chosen) return { total: pages.length, pages: pages.slice(0, NUM_PAGES) };
  const last = Math.min(total, NUM_PAGES);
  return { total, pages: last > 1 ? [...pages, ...(await draw(`2-${last}`)).pages] : pages };
}

/** A document: its name, the pages that are asked about, and what the first ones look like. */
function paper(one) {
  const about = h("span.muted", one.pages ? `Pages ${one.pages}` : "");
  const sheets = h("div.sheets", { tabindex: "0", role: "group", "aria-label": `What ${one.name} looks like` });
  const show = ({ total, pages }) => {
    sheets.append(...pages.map(({ page, width, height, url }) => h("img", { src: url, alt: `Page ${page}`, title: `Page ${page}`, width, height })));
    if (total > pages.length) sheets.append(h("span.muted", `and ${total - pages.length} more`));
    if (!one.pages) about.textContent = total === 1 ? "1 page" : `${total} pages`;
  };
  const chosen = one.pages ?? "";
  if (one.drawn?.chosen !== chosen) one.drawn = { chosen, pages: firstPages(one) };
  one.drawn.pages.then(show, ({ status, message }) => {
    if (status === 400 || status === 413) about.replaceChildren(...inline(message)); // of all else the answer tells
  });
  return h("div.paper", sheets, h("p", h("b", one.name), " ", about));
}

/** How a medium is shown in a list: a picture, a strip of frames, or a strip of pages. */
export function preview(one) {
  if (one.kind === "document") return paper(one);
  if (one.kind === "image") return h("img", { src: one.url, alt: one.name, width: one.width, height: one.height });
  const strip = h("div.frames", { role: "img", "aria-label": `Frames of ${one.name}` }, h("span", one.name));
  drawFrames(strip, one);
  return strip;
}
