// y[i] = x[i] @ w[experts[i]].T + bias[experts[i]] for rows x that are sorted by expert, reading an
// expert's weights once for each 64 of its rows. A row's sums are added in the same order whatever other
// rows there are.
//
// w: (E, N, K), x: (M, K), experts: (M,), bias: (E, N) or null, y: (M, N); K a multiple of 64.
// A block has 128 columns of one expert, blockIdx.y, and of its tiles of 64 rows each blockIdx.z-th one.
// A warp has 16 of the columns: it reads their weights into registers, those of the next 64 of K while it
// multiplies these. The tile of x lies in shared memory, in STAGES parts of 64 of K.

constexpr int TILE_ROWS = 64, TILE_DEPTH = 64, TILE_COLUMNS = 128, WARPS = TILE_COLUMNS / 16, STAGES = 3;
// Numbers of a row in shared memory: 16 bytes more, so that eight rows lie in different banks.
constexpr int TILE_ROW = TILE_DEPTH + 8;

// How many of the sorted `experts` are less than `expert`. All threads of a block look together.
__device__ inline int rows_before(const uint32_t* experts, int num_rows, int expert) {
  int low = 0, high = num_rows;
  while (low < high) {
    const int step = (high - low + blockDim.x - 1) / blockDim.x, at = low + threadIdx.x * step;
    const int below = __syncthreads_count(at < high && (int)experts[at] < expert);
    high = min(high, low + below * step);
    if (below > 0)
      low += (below - 1) * step + 1;
  }
  return low;
}

template <typename T>
__device__ void copy_rows(T (&tile)[TILE_ROWS * TILE_ROW], const T* x, int num_rows, int depth, int k) {
  constexpr int CHUNK = 16 / sizeof(T), CHUNKS = TILE_DEPTH / CHUNK;
  for (int i = threadIdx.x; i < TILE_ROWS * CHUNKS; i += WARPS * 32) {
    const int row = i / CHUNKS, part = i % CHUNKS * CHUNK;
    const bool is_there = row < num_rows && k < depth;
    copy_async(tile + row * TILE_ROW + part, x + (is_there ? (size_t)row * depth + k + part : 0), is_there);
  }
  asm volatile("cp.async.commit_group;");
}

template <typename Weights, typename T>
__device__ void multiply_rows(
    const Weights& w, const T* x, const T* bias, T* y, int num_rows, int expert, int num_columns, int depth) {
  __shared__ alignas(16) T tiles[STAGES][TILE_ROWS * TILE_ROW];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, member = lane % 4, first = member * Weights::STRIDE;
  const int column = blockIdx.x * TILE_COLUMNS + warp * 16 + group;
  const int low = expert * num_columns + min(column, num_columns - 1);
  const int high = expert * num_columns + min(column + 8, num_columns - 1);
  float sums[TILE_ROWS / 8][4] = {};

  for (int stage = 0; stage < STAGES - 1; stage++)
    copy_rows(tiles[stage], x, num_rows, depth, stage * TILE_DEPTH);
  typename Weights::Packed packed[2] = {w.fetch(low, depth, first), w.fetch(high, depth, first)};
  for (int step = 0, k = 0; k < depth; step++, k += TILE_DEPTH) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncthreads();
    copy_rows(tiles[(step + STAGES - 1) % STAGES], x, num_rows, depth, k + (STAGES - 1) * TILE_DEPTH);
    uint32_t a[2][8];
    Weights::unpack(packed[0], a[0]);
    Weights::unpack(packed[1], a[1]);
    if (k + TILE_DEPTH < depth) {
      packed[0] = w.fetch(low, depth, k + TILE_DEPTH + first);
      packed[1] = w.fetch(high, depth, k + TILE_DEPTH + first);
    }
    const T* tile = tiles[step % STAGES] + group * TILE_ROW + first;
#pragma unroll
    for (int part = 0; part < TILE_ROWS / 8; part++) {
      if (part * 8 < num_rows) {
        uint32_t b[8];
        *reinterpret_cast<uint4*>(&b[0]) = *reinterpret_cast<const uint4*>(tile + part * 8 * TILE_ROW);
        *reinterpret_cast<uint4*>(&b[4]) =
            *reinterpret_cast<const uint4*>(tile + part * 8 * TILE_ROW + Weights::FAR);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          const uint32_t both[4] = {a[0][j], a[1][j], a[0][j + 1], a[1][j + 1]};
          mma(sums[part], both, b[j], b[j + 1], T());
        }
      }
    }
  }
  asm volatile("cp.async.wait_group 0;");
  __syncthreads();  // The next tile of rows takes the same shared memory.

#pragma unroll
  for (int part = 0; part < TILE_ROWS / 8; part++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = part * 8 + member * 2 + i % 2, n = column + i / 2 * 8;
      if (row < num_rows && n < num_columns) {
        const float added = bias ? (float)bias[(size_t)expert * num_columns + n] : 0.0f;
        y[(size_t)row * num_columns + n] = (T)(sums[part][i] + added);
      }
    }
  }
}

template <typename Weights, typename T>
__device__ void expert_rows(
    const Weights& w, const T* x, const uint32_t* experts, const T* bias, T* y, int num_rows, int num_columns,
    int depth) {
  const int expert = blockIdx.y, begin = rows_before(experts, num_rows, expert);
  const int end = rows_before(experts, num_rows, expert + 1);
  for (int start = begin + blockIdx.z * TILE_ROWS; start < end; start += gridDim.z * TILE_ROWS)
    multiply_rows(
        w, x + (size_t)start * depth, bias, y + (size_t)start * num_columns, min(TILE_ROWS, end - start), expert,
        num_columns, depth);
}
