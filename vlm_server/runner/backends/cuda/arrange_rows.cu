// Rows of one layer's keys and values, anew: each gets some columns of a row of one of two sources,
// and zeros around them.
//
// Sources: (rows, G, any, D), last axis contiguous. places: (B, 6), for each new row its source (0 or
// 1), the row there, the first column and the number of columns, the column that the first becomes,
// and capacity. new_keys, new_values: (B, G, capacity, D), contiguous; rows of D are multiples of 16 bytes.
// A thread copies 16 bytes of a row: blockIdx.y is its head, blockIdx.z the row, of keys or of values.

using mlx::core::cu::Strides;

template <typename T>
__device__ void arrange_rows(
    const T* keys_0, const T* values_0, const T* keys_1, const T* values_1,
    const Strides& k_strides_0, const Strides& v_strides_0, const Strides& k_strides_1,
    const Strides& v_strides_1, const int* places, int num_rows, int num_groups, int size,
    T* new_keys, T* new_values) {
  constexpr int UNIT = 16 / sizeof(T);
  const int units = size / UNIT;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int column = i / units, part = i % units * UNIT;
  const int group = blockIdx.y, row = blockIdx.z % num_rows;
  const bool is_value = blockIdx.z >= num_rows;
  const int* place = places + 6 * row;
  const int capacity = place[5];
  if (column >= capacity)
    return;

  const bool is_second = place[0] == 1;
  const int from = column - place[4];
  const T* source = is_value ? (is_second ? values_1 : values_0) : (is_second ? keys_1 : keys_0);
  const Strides& strides = is_value ? (is_second ? v_strides_1 : v_strides_0)
                                    : (is_second ? k_strides_1 : k_strides_0);
  if (strides[3] != 1)
    __trap();  // rather than a wrong answer
  uint4 found = make_uint4(0, 0, 0, 0);
  if (from >= 0 && from < place[3])
    found = *reinterpret_cast<const uint4*>(
        source + place[1] * strides[0] + group * strides[1] + (place[2] + from) * strides[2] + part);
  T* target = is_value ? new_values : new_keys;
  const size_t there = (((size_t)row * num_groups + group) * capacity + column) * size + part;
  *reinterpret_cast<uint4*>(target + there) = found;
}
