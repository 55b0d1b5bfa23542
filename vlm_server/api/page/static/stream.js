// One answer's events, come what may: a broken line is resumed, and a busy or restarting server is waited for.

import { ApiError, ask, parts } from "./api.js";

const PATH = "v1/chat/completions";
const PROGRESS = { "X-VLM-Progress": "1" };
const WANTED = { "X-VLM-Resumable": "true", ...PROGRESS };
const LINE_SECONDS = 60; // as long as the server goes on with an answer that nobody reads
const BUSY_SECONDS = 600;
const MAX_DEATHS = 2; // of an engine at one question, which may be the reason
const BUSY = ["engine_unavailable", "queue_full", "key_limit_reached"];

/** What was written stays, and the rest has to be asked for anew. */
export class Interrupted extends Error {}

/**
 * Asks, and calls `take(event)` with each event, `note(id)` with the id from which the answer can be resumed, and
 * `tell(wait)` with what is waited for: {state, …} of the server, or {trouble, seconds} until the next try.
 * `from` is the id of an answer that has begun. Throws ApiError, Interrupted, or an AbortError.
 */
export async function stream({ body, signal, take, note, tell, from = null }) {
  const wait = new Waits(signal, tell);
  let hasText = Boolean(from);
  for (let id = from; ;) {
    try {
      const options = id
        ? { body: {}, headers: { ...PROGRESS, "Last-Event-ID": id } }
        : { body, headers: WANTED };
      const response = await ask(PATH, { ...options, signal });
      if (!id) note((id = response.headers.get("X-Request-Id")));
      for await (const part of parts(response)) {
        wait.over();
        if (part.comment) tellProgress(part.comment, tell);
        if (part.data === "[DONE]") return;
        if (!part.data) continue;
        const event = JSON.parse(part.data);
        if (event.error) throw new ApiError(0, event.error.message, event.error.code);
        hasText = true;
        take(event);
        if (part.id) note((id = part.id));
      }
      throw new ApiError(0, "The line to the server broke.", "line_broken");
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) {
        if (id) cancel(id);
        throw new DOMException("stopped", "AbortError");
      }
      const asked = id;
      id = await wait.after(error, id, hasText).catch((reason) => {
        if (asked && signal.aborted) cancel(asked);
        throw reason;
      });
    }
  }
}

/** Ends an answer in the engine: one that can be resumed goes on without a reader. */
function cancel(id) {
  const [request] = id.split(":");
  ask(`v1/requests/chatcmpl-${request}/cancel`, { method: "POST", quiet: true }).catch(() => null); // it has ended
}

class Waits {
  constructor(signal, tell) {
    Object.assign(this, { signal, tell, since: null, tries: 0, deaths: 0 });
  }

  /** Events come. */
  over() {
    this.since = null;
    this.tries = 0;
  }

  /** Waits until it makes sense to ask again; returns the id to go on from. Throws what can't be waited out. */
  async after(error, id, hasText) {
    const isLine = !(error instanceof ApiError) || ["unreachable", "line_broken"].includes(error.code);
    if (error.code === "engine_died" && ++this.deaths <= MAX_DEATHS) {
      dispatchEvent(new Event("trouble"));
      if (hasText) throw new Interrupted(error.message);
      id = null;
    } else if (id && error.status === 404) {
      if (hasText) throw new Interrupted("The server no longer has this answer.");
      id = null;
    } else if (!isLine && !BUSY.includes(error.code)) throw error;
    const now = performance.now();
    this.since ??= now;
    if (now - this.since > (isLine ? LINE_SECONDS : BUSY_SECONDS) * 1000)
      throw isLine ? new ApiError(0, UNREACHABLE, "unreachable") : error;
    const seconds = Math.max(Math.min(0.5 * 2 ** this.tries++, 5), Math.min(error.retryAfter ?? 0, 30));
    await this.pause(seconds, isLine ? "line" : error.code, error.message);
    return id;
  }

  async pause(seconds, trouble, reason) {
    const end = performance.now() + seconds * 1000;
    let wasDown = false;
    dispatchEvent(new Event("trouble")); // whoever shows the server's state looks again
    while (!this.signal.aborted && performance.now() < end) {
      const left = end - performance.now();
      this.tell({ trouble, reason, seconds: Math.ceil(left / 1000) });
      await new Promise((resolve) => setTimeout(resolve, Math.min(left, 250)));
      if (trouble !== "engine_unavailable") continue;
      const isUp = (await isReady(this.signal))?.ok;
      if (isUp && wasDown) break; // sooner than the server thought
      wasDown ||= !isUp;
    }
    this.signal.throwIfAborted();
  }
}

const UNREACHABLE = `The server could not be reached for ${LINE_SECONDS} seconds. Is it running?`;

function tellProgress(comment, tell) {
  if (!comment.startsWith("progress ")) return;
  try {
    tell(JSON.parse(comment.slice(9)));
  } catch {
    // a comment of another kind
  }
}

/** The answer to whether a model can answer; null if the server can't be reached. */
const isReady = (signal) => fetch("health/ready", { cache: "no-store", signal }).catch(() => null);

/** Waits until a model can answer, after its engine died. */
export async function untilReady(signal, tell) {
  const end = performance.now() + BUSY_SECONDS * 1000;
  while (performance.now() < end) {
    signal.throwIfAborted();
    const response = await isReady(signal);
    signal.throwIfAborted();
    if (response?.ok) return;
    tell({ trouble: response ? "engine_died" : "line" });
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
}
