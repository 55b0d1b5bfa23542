// Pictures, videos and documents on their way to the server: what can't be sent as it is, is made so that it can.

const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const VIDEOS = ["video/mp4", "video/webm"];
const DOCUMENTS = ["application/pdf"];
const MAX_SIDE = 4096;

/** {name, kind, url to show, dataUrl to send, width, height}. Throws an Error that says what is wrong. */
export async function attachment(file, limits) {
  if (VIDEOS.includes(file.type)) return made(file, file, "video");
  if (DOCUMENTS.includes(file.type)) return made(file, file, "document");
  if (!file.type.startsWith("image/"))
    throw new Error(`${name(file)} is no picture, video or PDF that can be sent.`);
  const size = await sizeOf(file);
  const isLarge =
    limits && (file.size > limits.max_image_bytes || size.width * size.height > limits.max_image_pixels);
  const sent = IMAGES.includes(file.type) && !isLarge ? file : await drawn(file, size);
  return { ...(await made(file, sent, "image")), ...size };
}

export const isMedia = (file) => file.type.startsWith("image/") || [...VIDEOS, ...DOCUMENTS].includes(file.type);

/** The part of a message that stands for it. */
export function part({ name, kind, dataUrl }) {
  if (kind === "document") return { type: "file", file: { filename: name, file_data: dataUrl } };
  return kind === "video"
    ? { type: "video_url", video_url: { url: dataUrl } }
    : { type: "image_url", image_url: { url: dataUrl } };
}

async function made(file, sent, kind) {
  return { name: name(file), kind, url: URL.createObjectURL(sent), dataUrl: await dataUrl(sent) };
}

const name = (file) => file.name || "pasted picture";

function dataUrl(blob) {
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
async function drawn(file, { width, height }) {
  const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const bitmap = await decoded(file);
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const type = scale < 1 || file.type === "image/jpeg" ? "image/jpeg" : "image/png";
  return new Promise((resolve) => canvas.toBlob(resolve, type, 0.92));
}
