// Conversations in this browser, in IndexedDB: their text, and apart from it their pictures. Bounded in bytes.

export const MAX_BYTES = 500 * 2 ** 20;

const NAME = "vlm_server";
const [SUMMARIES, TURNS, FILES] = ["summaries", "turns", "files"];

let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      for (const name of [SUMMARIES, TURNS]) request.result.createObjectStore(name, { keyPath: "id" });
      request.result.createObjectStore(FILES, { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab has an older version of this page open"));
  });
  opening.catch(() => (opening = null));
  return opening;
}

/** The result of `use(stores)` once its changes are stored. */
async function change(mode, use) {
  const transaction = (await open()).transaction([SUMMARIES, TURNS, FILES], mode);
  const stores = [SUMMARIES, TURNS, FILES].map((name) => transaction.objectStore(name));
  return new Promise((resolve, reject) => {
    const request = use(...stores);
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** {id, title, created, updated, bytes} of all conversations, the latest first. */
export async function summaries() {
  const found = await change("readonly", (kept) => kept.getAll());
  return found.sort((one, other) => other.updated - one.updated);
}

/** All conversations without the content of their pictures. */
export async function all() {
  const turns = new Map((await change("readonly", (_, kept) => kept.getAll())).map((one) => [one.id, one.turns]));
  return (await summaries()).map((one) => ({ ...one, turns: turns.get(one.id) ?? [] }));
}

/** A conversation without the content of its pictures; null if it is not kept. */
export async function load(id) {
  const summary = await change("readonly", (kept) => kept.get(id));
  const kept = await change("readonly", (_, turns) => turns.get(id));
  return summary && kept ? { ...summary, turns: kept.turns } : null;
}

/** The content of the pictures of a conversation, by id; those kept by earlier versions are Blobs. */
export async function files(id) {
  const found = await change("readonly", (_, __, contents) => contents.index("conversation").getAll(id));
  return new Map(found.map(({ id: name, data, type, blob }) => [name, blob ?? new Blob([data], { type })]));
}

/** Conversations deleted since the page was loaded: what was about to keep one must not bring it back. */
const forgotten = new Set();

/** Keeps a conversation, unless it was deleted; `isNew(medium)` of its media whose content is not kept yet. Throws a StoreError that says
 * why it is not kept. */
export async function keep({ id, title, created, updated, turns }, isNew) {
  if (forgotten.has(id)) return;
  const media = turns.flatMap((turn) => turn.media);
  const plain = turns.map((turn) => ({ ...turn, media: turn.media.map(withoutContent) }));
  const bytes = JSON.stringify(plain).length + media.reduce((sum, one) => sum + one.bytes, 0);
  try {
    const others = (await summaries()).filter((one) => one.id !== id);
    if (sizeOf(others) + bytes > MAX_BYTES) throw new StoreError(FULL);
    const contentOf = async ({ id: name, blob }) =>
      ({ id: name, conversation: id, data: await blob.arrayBuffer(), type: blob.type }); // private windows of Safari keep no Blob
    const added = await Promise.all(media.filter(isNew).map(contentOf));
    await change("readwrite", (kept, texts, contents) => {
      if (forgotten.has(id)) return; // while its pictures were read
      kept.put({ id, title, created, updated, bytes });
      texts.put({ id, turns: plain });
      for (const content of added) contents.put(content);
      drop(contents, id, new Set(media.map((one) => one.id)));
    });
  } catch (error) {
    if (error instanceof StoreError) throw error;
    throw new StoreError(error?.name === "QuotaExceededError" ? NO_ROOM : `${REFUSED} (${error?.message ?? "unknown"}).`);
  }
}

export class StoreError extends Error {}

const FULL = `Conversations take up all of the ${MAX_BYTES / 2 ** 20} MiB that this page keeps. Delete some to keep this one.`;
const NO_ROOM = "The browser has no room left for this conversation. Delete some, or free space on the disk.";
const REFUSED = "This browser does not keep conversations: this one is lost when the page is closed";

export const sizeOf = (list) => list.reduce((sum, { bytes = 0 }) => sum + bytes, 0);

const withoutContent = ({ blob, url, drawn, ...facts }) => facts;

/** Deletes the pictures of a conversation but for those in `used`. */
function drop(contents, id, used) {
  contents.index("conversation").getAllKeys(id).onsuccess = ({ target }) => {
    for (const name of target.result) if (!used.has(name)) contents.delete(name);
  };
}

export async function rename(id, title) {
  const kept = await change("readonly", (stored) => stored.get(id));
  if (kept) await change("readwrite", (stored) => stored.put({ ...kept, title }));
}

export async function forget(id) {
  forgotten.add(id);
  try {
    await change("readwrite", (kept, texts, contents) => {
      kept.delete(id);
      texts.delete(id);
      drop(contents, id, new Set());
    });
  } catch (error) {
    forgotten.delete(id);
    throw error;
  }
}
