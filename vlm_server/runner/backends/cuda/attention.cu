// softmax(q @ k.T * scale) @ v for the new tokens of each row, whose keys and values are written into
// the row's cache, in place. The last query attends to the row's last key, the one before it to all
// but that, and so on; if `window` is not 0, to as many keys at most. Queries that share a head of keys are rows of one matrix, so that keys and
// values are read once for all of them.
//
// A row's keys are split into at most `count_splits` parts of whole tiles, each for a block, which has
// 16 queries a warp. One tile is copied to shared memory while the one before is computed with.
// `merge` puts the parts together. Where a row is split depends on its length and on how many tokens
// are new alone: it gets the same numbers alone as in a batch, or beside a prompt.
//
// bounds: (B, 3), a row's first key, negative if it was dropped, the one after its last, and how many
// of them are new; further queries are padding.

using mlx::core::cu::Strides;

constexpr int SUITABLE_BLOCKS = 256;  // of a row, to keep a GPU busy
constexpr int MAX_SPLITS = 64;

__device__ inline int count_splits(int num_rows, int num_groups) {
  const int num_blocks = (num_rows + 63) / 64;
  return max(min(SUITABLE_BLOCKS / (num_blocks * num_groups), MAX_SPLITS), 1);
}

__device__ inline int split_length(int num_keys, int num_splits) {
  const int num_tiles = (num_keys + KEYS - 1) / KEYS;
  return (num_tiles + num_splits - 1) / num_splits * KEYS;
}

// One row of an array (B, heads, L, D), last axis contiguous.
template <typename T>
struct Lines {
  T* first;
  int64_t of_head, of_token;

  __device__ T* at(int head, size_t token) const {
    return first + head * of_head + token * of_token;
  }
};

template <typename T>
__device__ Lines<T> row_of(T* array, const Strides& strides, int row) {
  if (strides[3] != 1)
    __trap();  // rather than a wrong answer
  return {array + row * strides[0], strides[1], strides[2]};
}

// The same of an array (tokens, heads, 1, D), of which the row's tokens begin at `row`.
template <typename T>
__device__ Lines<T> tokens_from(T* array, const Strides& strides, int row) {
  if (strides[3] != 1)
    __trap();
  return {array + row * strides[0], strides[1], strides[0]};
}

// The first key that may be needed by one of a row's new tokens.
__device__ inline int first_key_of(const int* bounds, int window) {
  const int first_new = bounds[1] - bounds[2];
  return max(max(bounds[0], 0), window ? first_new - window + 1 : 0);
}

// parts: (L, H, splits, D), of each split softmax(...) @ v; weights: (L, H, splits), the logarithm to
// base 2 of what it weighs. `index` of a split, a block, and a part of the values, for each group.
template <int D, typename T>
__device__ void attention(
    int index, const Lines<const T>& queries, const Lines<const T>& new_keys,
    const Lines<const T>& new_values, const Lines<T>& keys, const Lines<T>& values,
    const int* bounds, int num_heads, int num_queries, int num_groups, float scale, int window,
    float* parts, float* weights) {
  constexpr int DV = values_of_block<D>, ROW = tile_row<D>, V_ROW = tile_row<DV>;
  constexpr int STAGE = KEYS * (ROW + V_ROW), STAGES = D > 128 ? 1 : 2;
  extern __shared__ uint4 shared[];
  T* tiles = reinterpret_cast<T*>(shared);  // [stage], keys and values: [KEYS][ROW], [KEYS][V_ROW]
  const int first_value = index % (D / DV) * DV;
  index /= D / DV;
  const int warp = threadIdx.x / 32, quad = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
  const int group = blockIdx.y, block_rows = blockDim.x / 32 * 16;
  const int shared_heads = num_heads / num_groups, num_rows = num_queries * shared_heads;
  const int num_blocks = (num_rows + block_rows - 1) / block_rows;
  const int num_splits = count_splits(num_rows, num_groups), split = index / num_blocks;
  const int block = num_blocks - 1 - index % num_blocks;  // those with most keys first
  const int end_key = bounds[1], first_new = end_key - bounds[2];
  const int first_key = first_key_of(bounds, window);
  const int last_row = min((block + 1) * block_rows, num_rows) - 1;
  const auto limit_of = [&](int row) {  // the last key of a query
    return min(first_new + row / shared_heads, end_key - 1);
  };
  const int first_limit = limit_of(block * block_rows), last_limit = limit_of(last_row);
  const int length = split_length(end_key - first_key, num_splits);
  const int first_of_split = first_key + split * length;
  const int end = min(last_limit + 1, first_of_split + length);
  const int begin = window ? max(first_of_split, first_limit - window + 1) : first_of_split;
  if (begin >= end || split >= num_splits)
    return;

  const auto fetch = [&](int stage, int start) {
    T* k_tile = tiles + stage * STAGE;
    T* v_tile = k_tile + KEYS * ROW;
    for (int i = threadIdx.x; i < KEYS * (D / 8); i += blockDim.x) {
      const int key = i / (D / 8), part = i % (D / 8) * 8;
      const bool is_there = start + key < end;
      const int from = is_there ? start + key : begin;
      const bool is_new = from >= first_new;
      const T* k = (is_new ? new_keys.at(group, from - first_new) : keys.at(group, from)) + part;
      copy_async(k_tile + key * ROW + part, k, is_there);
      // The last block sees all keys that later tokens may attend to.
      const bool is_written = is_new && is_there && block == num_blocks - 1;
      if (is_written && first_value == 0)
        *reinterpret_cast<uint4*>(keys.at(group, from) + part) = *reinterpret_cast<const uint4*>(k);
      if (part < first_value || part >= first_value + DV)
        continue;
      const T* v = (is_new ? new_values.at(group, from - first_new) : values.at(group, from)) + part;
      copy_async(v_tile + key * V_ROW + part - first_value, v, is_there);
      if (is_written)
        *reinterpret_cast<uint4*>(values.at(group, from) + part) = *reinterpret_cast<const uint4*>(v);
    }
    asm volatile("cp.async.commit_group;");
  };
  fetch(0, begin);

  Queries<D> q;
  int limits[2];  // the last key of each of the two
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = min(block * block_rows + warp * 16 + quad + half * 8, num_rows - 1);
    const int token = row / shared_heads, head = group * shared_heads + row % shared_heads;
    limits[half] = limit_of(row);
    q.load(half, queries.at(head, token));
  }

  const float factor = scale * 1.4426950408889634f;  // so that exp2 serves as exp
  OnlineSoftmax<D, DV> softmax;
  int stage = 0;
  for (int start = begin; start < end; start += KEYS) {
    if (STAGES == 2 && start + KEYS < end) {
      fetch(stage ^ 1, start + KEYS);
      asm volatile("cp.async.wait_group 1;");
    } else {
      asm volatile("cp.async.wait_group 0;");
    }
    __syncthreads();
    const T* k_tile = tiles + stage * STAGE;
    const auto is_masked = [&](int half, int key) {
      const int limit = limits[half];
      return start + key > min(limit, end - 1) || (window && start + key <= limit - window);
    };
    const bool has_mask =
        start + KEYS - 1 > min(first_limit, end - 1) || (window && start <= last_limit - window);
    softmax.add(q, k_tile, k_tile + KEYS * ROW, factor, has_mask, is_masked);
    __syncthreads();
    if (STAGES == 2)
      stage ^= 1;
    else if (start + KEYS < end)
      fetch(0, start + KEYS);
  }

  softmax.add_up();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = block * block_rows + warp * 16 + quad + half * 8;
    if (row >= num_rows)
      continue;
    const int token = row / shared_heads, head = group * shared_heads + row % shared_heads;
    const size_t place = (size_t)token * num_heads + head;
    const float share = softmax.share(half);
    float* part = parts + (place * num_splits + split) * D + first_value;
#pragma unroll
    for (int n = 0; n < DV / 8; n++)
      *reinterpret_cast<float2*>(part + n * 8 + member * 2) =
          make_float2(softmax.sums[n][2 * half] * share, softmax.sums[n][2 * half + 1] * share);
    if (member == 0 && first_value == 0)
      weights[place * num_splits + split] = softmax.weight(half, factor);
  }
}

// Puts the parts of one query and head together, by a warp. `token`: of the new ones.
template <int D, typename T>
__device__ void merge(
    const float* parts, const float* weights, const int* bounds, int token, int num_splits, int window,
    T* out) {
  const int lane = threadIdx.x % 32, first_key = first_key_of(bounds, window);
  const int length = split_length(bounds[1] - first_key, num_splits);
  const int limit = min(bounds[1] - bounds[2] + token, bounds[1] - 1);
  const int count = (limit - first_key + length) / length;
  const int first = window ? max(limit - window + 1 - first_key, 0) / length : 0;
  float most = -INFINITE;
  for (int i = first; i < count; i++)
    most = fmaxf(most, weights[i]);
  float sums[(D + 31) / 32] = {}, total = 0.0f;
  for (int i = first; i < count; i++) {
    const float weight = exp2f(weights[i] - most);
    total += weight;
#pragma unroll
    for (int n = 0; n < (D + 31) / 32; n++)
      if (n * 32 + lane < D)
        sums[n] += weight * parts[i * D + n * 32 + lane];
  }
#pragma unroll
  for (int n = 0; n < (D + 31) / 32; n++)
    if (n * 32 + lane < D)
      out[n * 32 + lane] = (T)(sums[n] / total);
}

// ---- rows with as many new tokens each ----
//
// queries: (B, H, L, D), new_keys, new_values: (B, G, L, D), keys, values: (B, G, capacity, D).
// parts: (B, L, H, splits, D), weights: (B, L, H, splits), out: (B, L, H, D).

template <int D, typename T>
__device__ void attention_of_rows(
    const T* queries, const T* new_keys, const T* new_values, T* keys, T* values, const int* bounds,
    const Strides& q_strides, const Strides& new_k_strides, const Strides& new_v_strides,
    const Strides& k_strides, const Strides& v_strides, int num_heads, int num_queries,
    int num_groups, float scale, int window, float* parts, float* weights) {
  const int row = blockIdx.z;
  const int num_splits = count_splits(num_queries * num_heads / num_groups, num_groups);
  const size_t place = (size_t)row * num_queries * num_heads * num_splits;
  attention<D>(
      blockIdx.x, row_of(queries, q_strides, row), row_of(new_keys, new_k_strides, row),
      row_of(new_values, new_v_strides, row), row_of(keys, k_strides, row),
      row_of(values, v_strides, row), bounds + 3 * row, num_heads, num_queries, num_groups, scale,
      window, parts + place * D, weights + place);
}

template <int D, typename T>
__device__ void merge_rows(
    const float* parts, const float* weights, const int* bounds, int num_heads, int num_queries,
    int num_rows, int num_splits, int window, T* out) {
  const int place = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (place >= num_rows * num_queries * num_heads)
    return;
  const int row = place / (num_queries * num_heads), token = place / num_heads % num_queries;
  const size_t part = (size_t)place * num_splits;
  merge<D>(
      parts + part * D, weights + part, bounds + 3 * row, token, num_splits, window,
      out + (size_t)place * D);
}

// ---- rows with one new token each, and a prompt's new tokens ----
//
// queries: (B + L, H, 1, D), of which the last L are the prompt's; new_keys, new_values: (B + L, G, 1,
// D). keys, values: (B, G, capacity, D), prompt_keys, prompt_values: (1, G, capacity, D).
// parts: those of the B rows, (B, H, row splits, D), before those of the prompt, (L, H, splits, D);
// weights likewise. out: (B + L, H, 1, D).

template <int D, typename T>
__device__ void attention_mixed(
    const T* queries, const T* new_keys, const T* new_values, T* keys, T* values, const int* bounds,
    T* prompt_keys, T* prompt_values, const int* prompt_bounds, const Strides& q_strides,
    const Strides& new_k_strides, const Strides& new_v_strides, const Strides& k_strides,
    const Strides& v_strides, const Strides& prompt_k_strides, const Strides& prompt_v_strides,
    int num_heads, int num_rows, int num_tokens, int num_groups, float scale, int window,
    float* parts, float* weights) {
  const int row = blockIdx.z;
  const bool is_prompt = row == num_rows;
  const size_t place = (size_t)row * num_heads * count_splits(num_heads / num_groups, num_groups);
  attention<D>(
      blockIdx.x, tokens_from(queries, q_strides, row), tokens_from(new_keys, new_k_strides, row),
      tokens_from(new_values, new_v_strides, row),
      is_prompt ? row_of(prompt_keys, prompt_k_strides, 0) : row_of(keys, k_strides, row),
      is_prompt ? row_of(prompt_values, prompt_v_strides, 0) : row_of(values, v_strides, row),
      is_prompt ? prompt_bounds : bounds + 3 * row, num_heads,
      is_prompt ? num_tokens - num_rows : 1, num_groups, scale, window, parts + place * D,
      weights + place);
}

template <int D, typename T>
__device__ void merge_mixed(
    const float* parts, const float* weights, const int* bounds, const int* prompt_bounds,
    int num_heads, int num_groups, int num_rows, int num_tokens, int window, T* out) {
  int place = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (place >= num_tokens * num_heads)
    return;
  out += (size_t)place * D;
  const int shared_heads = num_heads / num_groups;
  int num_splits = count_splits(shared_heads, num_groups), token = 0;
  size_t part = (size_t)min(place, num_rows * num_heads) * num_splits;
  if (place < num_rows * num_heads) {
    bounds += 3 * (place / num_heads);
  } else {
    place -= num_rows * num_heads;
    bounds = prompt_bounds;
    token = place / num_heads;
    num_splits = count_splits((num_tokens - num_rows) * shared_heads, num_groups);
    part += (size_t)place * num_splits;
  }
  merge<D>(parts + part * D, weights + part, bounds, token, num_splits, window, out);
}
