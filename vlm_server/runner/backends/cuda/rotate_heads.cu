// RoPE of queries and keys at once, in float32.
//
// queries: (B, H, L, D), keys: (B, G, L, D), last axis contiguous; cosines, sines: (B or 1, 1, L, half), of
// any strides. new_queries and new_keys are contiguous. Of each head, pairs (i, i + half) are rotated and
// what comes after is copied. A thread has a pair, or two neighbours that are copied.

using mlx::core::cu::Strides;

template <typename T>
__device__ void rotate_pair(const T* x, T* y, int i, int half, float cosine, float sine) {
  if (i < half) {
    const float first = (float)x[i], second = (float)x[i + half];
    y[i] = (T)(first * cosine - second * sine);
    y[i + half] = (T)(second * cosine + first * sine);
  } else {
    y[2 * i] = x[2 * i];
    y[2 * i + 1] = x[2 * i + 1];
  }
}

template <typename Q, typename K>
__device__ void rotate_heads(
    const Q* queries, const K* keys, const float* cosines, const float* sines,
    const Strides& q_strides, const Strides& k_strides, const Strides& cos_strides,
    const Strides& sin_strides, int num_rows, int num_heads, int num_groups, int num_tokens,
    int size, int num_angles, int half, Q* new_queries, K* new_keys) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int pair = i % (size / 2), both = num_heads + num_groups;
  const int head = i / (size / 2) % both, place = i / (size / 2) / both;
  const int token = place % num_tokens, row = place / num_tokens;
  if (row >= num_rows)
    return;
  if (q_strides[3] != 1 || k_strides[3] != 1)
    __trap();  // rather than a wrong answer

  float cosine = 0, sine = 0;
  if (pair < half) {
    const int angles = row % num_angles;
    cosine = cosines[angles * cos_strides[0] + token * cos_strides[2] + pair * cos_strides[3]];
    sine = sines[angles * sin_strides[0] + token * sin_strides[2] + pair * sin_strides[3]];
  }
  if (head < num_heads) {
    const Q* x = queries + row * q_strides[0] + head * q_strides[1] + token * q_strides[2];
    Q* y = new_queries + (((size_t)row * num_heads + head) * num_tokens + token) * size;
    rotate_pair(x, y, pair, half, cosine, sine);
  } else {
    const int group = head - num_heads;
    const K* x = keys + row * k_strides[0] + group * k_strides[1] + token * k_strides[2];
    K* y = new_keys + (((size_t)row * num_groups + group) * num_tokens + token) * size;
    rotate_pair(x, y, pair, half, cosine, sine);
  }
}
