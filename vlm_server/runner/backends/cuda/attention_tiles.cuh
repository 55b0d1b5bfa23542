// Attention of a warp's 16 queries to tiles of keys and values in shared memory, by tensor cores. Of the
// queries, a thread has two rows (`half`), and pairs of neighbours in them.

constexpr int KEYS = 64;  // of a tile
#define INFINITE __int_as_float(0x7f800000)

// Numbers of a tile's row: 16 bytes more than a head, so that eight rows lie in different banks.
template <int D>
constexpr int tile_row = D + 8;

// Numbers of a head's values that a block of threads sums up: a thread has registers for no more.
template <int D>
constexpr int values_of_block = D > 128 ? 128 : D;

__device__ inline void load_matrices(uint32_t (&m)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"((uint32_t)__cvta_generic_to_shared(shared)));
}

__device__ inline void load_transposed(uint32_t (&m)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"((uint32_t)__cvta_generic_to_shared(shared)));
}

template <int D>
struct Queries {
  uint32_t of[D / 16][4];

  // `query`: the thread's row of this half.
  template <typename T>
  __device__ void load(int half, const T* query) {
    const int member = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      of[k][half] = *reinterpret_cast<const uint32_t*>(query + k * 16 + member * 2);
      of[k][half + 2] = *reinterpret_cast<const uint32_t*>(query + k * 16 + member * 2 + 8);
    }
  }
};

// softmax(q @ k.T * scale) @ v over the tiles so far, not divided by what all weights add up to. `v` has
// DV numbers of each value.
template <int D, int DV = D>
struct OnlineSoftmax {
  float sums[DV / 8][4] = {}, total[2] = {}, most[2] = {-INFINITE, -INFINITE};

  // `factor`: the scale, times log2(e), so that exp2 serves as exp. If `has_mask`, a query attends only to
  // keys that are not `is_masked(half, key)`.
  template <typename T, typename IsMasked>
  __device__ void add(
      const Queries<D>& q, const T* k_tile, const T* v_tile, float factor, bool has_mask,
      const IsMasked& is_masked) {
    constexpr int ROW = tile_row<D>;
    const int lane = threadIdx.x % 32, member = threadIdx.x % 4;
    float scores[KEYS / 8][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        uint32_t b[4];
        const int key = n * 16 + lane / 16 * 8 + lane % 8, part = k * 16 + lane / 8 % 2 * 8;
        load_matrices(b, k_tile + key * ROW + part);
        mma(scores[2 * n], q.of[k], b[0], b[1], T());
        mma(scores[2 * n + 1], q.of[k], b[2], b[3], T());
      }
    }

    if (has_mask) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (is_masked(i / 2, n * 8 + member * 2 + i % 2))
            scores[n][i] = -INFINITE;
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = most[half];
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
        top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float shift = top == -INFINITE ? 0.0f : top * factor;
      const float rescale = exp2f(most[half] * factor - shift);
      most[half] = top;
      total[half] *= rescale;
#pragma unroll
      for (int n = 0; n < DV / 8; n++) {
        sums[n][2 * half] *= rescale;
        sums[n][2 * half + 1] *= rescale;
      }
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++) {
          scores[n][i] = exp2f(scores[n][i] * factor - shift);
          total[half] += scores[n][i];
        }
    }

#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      const uint32_t p[4] = {
          pack(scores[2 * k][0], scores[2 * k][1], T()), pack(scores[2 * k][2], scores[2 * k][3], T()),
          pack(scores[2 * k + 1][0], scores[2 * k + 1][1], T()),
          pack(scores[2 * k + 1][2], scores[2 * k + 1][3], T())};
#pragma unroll
      for (int n = 0; n < DV / 16; n++) {
        uint32_t b[4];
        const int key = k * 16 + lane % 16, part = n * 16 + lane / 16 * 8;
        load_transposed(b, v_tile + key * tile_row<DV> + part);
        mma(sums[2 * n], p, b[0], b[1], T());
        mma(sums[2 * n + 1], p, b[2], b[3], T());
      }
    }
  }

  // After the last tile.
  __device__ void add_up() {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      total[half] += __shfl_xor_sync(~0u, total[half], 1);
      total[half] += __shfl_xor_sync(~0u, total[half], 2);
    }
  }

  __device__ float share(int half) const { return total[half] > 0.0f ? 1.0f / total[half] : 0.0f; }

  // The logarithm to base 2 of what all weights add up to.
  __device__ float weight(int half, float factor) const {
    return total[half] > 0.0f ? most[half] * factor + log2f(total[half]) : -INFINITE;
  }
};
