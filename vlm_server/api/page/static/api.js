// Asks the server, with the key of this tab if one is needed. The key is in sessionStorage alone.

import { $ } from "./dom.js";

const KEY = "vlm_server key";

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    Object.assign(this, { status, code });
  }
}

export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

/** The response to a request that was accepted. Throws ApiError, and asks for a key if there is none. */
export async function ask(path, options = {}) {
  for (;;) {
    const used = sessionStorage.getItem(KEY);
    const response = await send(path, options, used);
    if (response.ok) return response;
    const error = await readError(response);
    if (response.status !== 401) throw error;
    if (!options.quiet && (await askForKey(used))) continue;
    throw error;
  }
}

/** What a look for news finds: such requests are not in the server's log. */
export const get = async (path, options) => (await ask(path, { ...options, isLook: true })).json();

/** The module called `name`. If it can't be had, null; the page says so, until another one can. */
export async function later(name) {
  const module = await load(name).catch(() => null);
  $("unloaded").hidden = Boolean(module);
  return module;
}

const failures = new Map();

/** Imports a module. Some browsers keep a failed import for the document's life: the next try has another address. */
export async function load(name) {
  const before = failures.get(name) ?? 0;
  try {
    return await import(before ? `${name}?again=${before}` : name);
  } catch (error) {
    failures.set(name, before + 1);
    throw error;
  }
}

async function send(path, { body, method, signal, headers: more, isLook }, key) {
  const headers = { ...more };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (isLook) headers["X-VLM-Look"] = "1";
  const isFile = body instanceof Blob;
  if (body !== undefined) headers["Content-Type"] = isFile ? body.type : "application/json";
  try {
    return await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers,
      signal,
      cache: "no-store",
      body: body === undefined || isFile ? body : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    dispatchEvent(new Event("trouble")); // whoever shows the server's state looks again
    throw new ApiError(0, "The server can’t be reached. Is it running?", "unreachable");
  }
}

async function readError(response) {
  const made = await response
    .json()
    .then(({ error }) => new ApiError(response.status, error.message, error.code))
    .catch(() => new ApiError(response.status, `The server answered with status ${response.status}.`, ""));
  made.retryAfter = Number(response.headers.get("Retry-After")) || 0;
  return made;
}

/** What a person is told who may not see something, or of what went wrong. */
export const adminProblem = (error) =>
  error.status === 403
    ? "Your key may ask questions, but not see this. Use one with admin = true."
    : error.message;

/** The lines of a response as they come. */
async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(broken);
    if (done) return;
    const whole = (rest + value).split("\n");
    rest = whole.pop();
    yield* whole;
  }
}

function broken(error) {
  if (error.name !== "AbortError") dispatchEvent(new Event("trouble"));
  throw error;
}

export async function* jsonLines(response) {
  for await (const line of lines(response)) yield JSON.parse(line);
}

/** The parts of a stream of events as they come: {data, id} for an event, {comment} for a comment. */
export async function* parts(response) {
  let data = [];
  let id = null;
  for await (const line of lines(response)) {
    if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
    else if (line.startsWith("data: ")) data.push(line.slice(6));
    else if (line.startsWith("id: ")) id = line.slice(4);
    else if (!line && data.length) {
      yield { data: data.join("\n"), id };
      data = [];
    }
  }
}

/** The events of a stream as objects, up to its end. Throws ApiError for one that is an error. */
export async function* events(response) {
  for await (const { data } of parts(response)) {
    if (data === "[DONE]") return;
    if (!data) continue;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(0, event.error.message, event.error.code);
    yield event;
  }
}

let asking = null;

/** Whether a key was given. One dialog serves all. */
function askForKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return Promise.resolve(true);
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-why").textContent = refused
      ? "That key was not accepted. Check it, and try again."
      : "This server asks for a key. It is kept in this tab until you close it.";
    sessionStorage.removeItem(KEY);
    $("key").value = "";
    $("key-cancel").onclick = () => dialog.close();
    dialog.onsubmit = () => sessionStorage.setItem(KEY, $("key").value.trim());
    dialog.onclose = () => {
      asking = null;
      resolve(hasKey());
    };
    dialog.showModal();
  });
  return asking;
}
