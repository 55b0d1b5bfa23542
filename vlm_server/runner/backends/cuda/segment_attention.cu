// softmax(q @ k.T * scale) @ v of patches that attend to the segment of their frame which they lie in, such
// as a window, and to nothing else.
//
// queries, keys, values: (F, P, H, D), last axis contiguous, patches sorted by segment; out: as much,
// contiguous. blocks: (N, 3), a block's first query, its segment's first patch and the one after its last.
// A block has up to 64 queries of one head, 16 a warp.

using mlx::core::cu::Strides;

template <int D, typename T>
__device__ void copy_tile(T* tile, const T* rows, int64_t stride, int count) {
  for (int i = threadIdx.x; i < KEYS * (D / 8); i += blockDim.x) {
    const int row = i / (D / 8), part = i % (D / 8) * 8;
    const bool is_there = row < count;
    copy_async(tile + row * tile_row<D> + part, rows + (is_there ? row : 0) * stride + part, is_there);
  }
}

template <int D, typename T>
__device__ void segment_attention(
    const T* queries, const T* keys, const T* values, const int* blocks, const Strides& q_strides,
    const Strides& k_strides, const Strides& v_strides, int num_patches, int num_heads, float scale,
    T* out) {
  extern __shared__ uint4 shared[];
  T* k_tile = reinterpret_cast<T*>(shared);
  T* v_tile = k_tile + KEYS * tile_row<D>;
  const int head = blockIdx.y, frame = blockIdx.z, member = threadIdx.x % 4;
  const int* block = blocks + 3 * blockIdx.x;
  const int begin = block[1], end = block[2];
  const int patch = block[0] + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  if (q_strides[3] != 1 || k_strides[3] != 1 || v_strides[3] != 1)
    __trap();  // rather than a wrong answer
  queries += frame * q_strides[0] + head * q_strides[2];
  keys += frame * k_strides[0] + head * k_strides[2];
  values += frame * v_strides[0] + head * v_strides[2];

  Queries<D> q;
#pragma unroll
  for (int half = 0; half < 2; half++)
    q.load(half, queries + min(patch + half * 8, end - 1) * q_strides[1]);

  OnlineSoftmax<D> softmax;
  const float factor = scale * 1.4426950408889634f;
  for (int start = begin; start < end; start += KEYS) {
    const int count = min(end - start, KEYS);
    if (start > begin)
      __syncthreads();
    copy_tile<D>(k_tile, keys + start * k_strides[1], k_strides[1], count);
    copy_tile<D>(v_tile, values + start * v_strides[1], v_strides[1], count);
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 0;");
    __syncthreads();
    softmax.add(
        q, k_tile, v_tile, factor, count < KEYS, [&](int half, int key) { return key >= count; });
  }

  softmax.add_up();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int mine = patch + half * 8;
    if (mine >= end)
      continue;
    const float share = softmax.share(half);
    T* row = out + (((size_t)frame * num_patches + mine) * num_heads + head) * D;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *reinterpret_cast<uint32_t*>(row + n * 8 + member * 2) =
          pack(softmax.sums[n][2 * half] * share, softmax.sums[n][2 * half + 1] * share, T());
  }
}
