/* Attention with every table of `locant.terms.Terms`, forward and backward, in tiles: memory linear in the length.

   logit_ij = scale · ( (q_i ∘ gain_r)·k_j  +  p_i·query_r  +  t_j·key_r )  +  bias_r  +  level_r · (e_i + d_j)
   logit_ij → τ_i · logit_ij                                                                r = k_pos[j] − q_pos[i]
   logit_ij → softcap · tanh(logit_ij / softcap)                                            if there is a softcap
   out_i    = Σ_j softmax(logit)_ij · (v_j + value_r)

   With sinks, the softmax of head h has one more logit, sinks[h], without a value: the softmax starts from it.

   The tables gain, query, key, bias, level and value are G, a, c, b, m and u of terms.py. q and k are the (possibly
   rotated) content. p and t (raw_q, raw_k) are q and k without the rotation, or vectors of another width that a scheme
   computes for each token. e, d and τ (query_level, key_level, temperature) are numbers of
   each token. Column 0 of the tables is for r = first_offset. An offset beyond either end of the tables takes the
   column at that end.

   With distant rotations (left, right, distant) the content product depends on the offset: left_i·distant_j where
   r < −distance, right_i·distant_j where r > distance, and q_i·k_j between. A tile computes the products that its pairs
   need, one of them in most tiles, and selects.

   A tile is n ≤ TILE queries by m ≤ TILE keys; i counts its queries and j its keys. There are four kinds of tiles:

     SKIP     no query may attend to a key (mask, lowest, highest): nothing to compute.
     FAR      every pair is at or beyond one end of the tables. One column serves all pairs, so terms are vectors, not
              matrix products.
     BAND     r = constant + j − i. The products of the queries with a run of columns are a matrix product in which
              pair (i, j) needs column j − i: row i is needed i places further left. The product is written with a row
              stride one longer than that of the tile (and read so in the backward pass), which is that shift.
     SCATTER  anything else, such as a tile in which packed sequences meet: pair by pair.

   A tile is also left out if all its weights would be 0 in float32, because its logits are too far below the largest of
   each query (`vanishes`): a bias that falls with the distance makes most tiles of a long sequence so. The results have
   the same bits as with these tiles; a tile with numbers that are not finite is computed, as 0 · ∞ is NaN.

   Everything is float32 inside. One matrix kernel, `micro_kernel`, does the work; it reads its second operand one panel
   of PANEL lanes at a time. Plain C with GNU vectors: gcc or clang, any CPU. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

typedef int64_t Int;

/* ---------------------------------------------------------------- vectors */

/* LANES: floats in a vector register. BLOCK_ROWS: rows that `micro_kernel` computes at a time. */
#if defined(__AVX512F__)
#define LANES 16
#define BLOCK_ROWS 12
#elif defined(__AVX__)
#define LANES 8
#define BLOCK_ROWS 6
#elif defined(__aarch64__)
#define LANES 4
#define BLOCK_ROWS 8
#else
#define LANES 4
#define BLOCK_ROWS 6
#endif
#define PANEL_VECTORS 2
#define PANEL (LANES * PANEL_VECTORS)
#define TILE 128
#define MARGIN (2 * PANEL) /* a shifted product reaches up to PANEL + BLOCK_ROWS beyond its tile on either side */
#define TILE_STRIDE (TILE + 2 * MARGIN) /* from row to row of a tile */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const unaligned_vec *)p; }
INLINE void store(float *p, vec x) { *(unaligned_vec *)p = x; }
INLINE vec broadcast(float x) { return x - (vec){0}; }
INLINE vec choose(ivec which, vec a, vec b) { return (vec)((which & (ivec)a) | (~which & (ivec)b)); }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }
INLINE float sum_lanes(vec x) {
  float s = 0;
  for (int i = 0; i < LANES; i++) s += x[i];
  return s;
}
INLINE float max_lanes(vec x) {
  float s = x[0];
  for (int i = 1; i < LANES; i++) s = x[i] > s ? x[i] : s;
  return s;
}

/* a0 b0 a1 b1 … of the lower and of the upper halves */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#if LANES == 16
#define ALTERNATE_LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ALTERNATE_HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define ALTERNATE_LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ALTERNATE_HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define ALTERNATE_LOW(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define ALTERNATE_HIGH(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#endif

/* e^x of each lane to about 1 unit in the last place; 0 below the smallest normal number, NaN of NaN */
INLINE vec exp_lanes(vec x) {
  const ivec tiny = x < -87.33654f;
  vec y = choose(tiny, broadcast(-87.33654f), x);
  const vec shifted = y * 1.44269504f + 12582912.0f; /* 1.5 · 2^23: the sum is rounded to a whole number */
  const vec n = shifted - 12582912.0f;
  vec r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const ivec power = ((ivec)shifted << 23) + (ivec)p;
  return choose(x != x, x, (vec)(~tiny & power));
}

/* tanh of each lane to about 2 units in the last place; NaN of NaN. Up to 0.625 a polynomial, minimax of the relative
   error: there 1 − e^(−2x) would cancel. */
INLINE vec tanh_lanes(vec x) {
  const ivec sign = (ivec)x & INT32_MIN;
  const vec size = (vec)((ivec)x & INT32_MAX), square = x * x;
  vec p = broadcast(-5.7049873285e-3f);
  p = p * square + 2.0639088005e-2f;
  p = p * square - 5.3739715368e-2f;
  p = p * square + 1.3331441581e-1f;
  p = p * square - 3.3333280683e-1f;
  const vec near_zero = p * square * x + x;
  const vec e = exp_lanes(size * -2.0f);
  const vec far_from_it = (vec)(sign | (ivec)((1.0f - e) / (1.0f + e)));
  return choose(size < 0.625f, near_zero, far_from_it);
}

/* ---------------------------------------------------------------- products */

/* C[i][lane] (+)= Σ_k A[i·a_row + k·a_column] · B[k·b_row + lane], for `rows` ≤ BLOCK_ROWS rows and `vectors` ≤
   PANEL_VECTORS vectors of lanes */
INLINE void micro_kernel(const int rows, const int vectors, Int depth, const float *a, Int a_row, Int a_column,
                         const float *b, Int b_row, float *c, Int c_row, int add) {
  vec acc[BLOCK_ROWS][PANEL_VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int u = 0; u < vectors; u++) acc[i][u] = (vec){0};
  for (Int k = 0; k < depth; k++) {
    vec y[PANEL_VECTORS];
#pragma GCC unroll 4
    for (int u = 0; u < vectors; u++) y[u] = load(b + u * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
      const vec x = broadcast(a[i * a_row]);
#pragma GCC unroll 4
      for (int u = 0; u < vectors; u++) acc[i][u] += x * y[u];
    }
    a += a_column;
    b += b_row;
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int u = 0; u < vectors; u++) {
      float *to = c + i * c_row + u * LANES;
      store(to, add ? load(to) + acc[i][u] : acc[i][u]);
    }
}

/* `micro_kernel` compiled for each number of rows, for whole panels and for a single vector */
static void block_product(int rows, int vectors, Int depth, const float *a, Int a_row, Int a_column, const float *b,
                          Int b_row, float *c, Int c_row, int add) {
  /* clang-format off */
  switch (vectors == 1 ? -rows : rows) {
#define CASE(N)                                                                                                        \
  case N: micro_kernel(N, PANEL_VECTORS, depth, a, a_row, a_column, b, b_row, c, c_row, add); break;                   \
  case -N: micro_kernel(N, 1, depth, a, a_row, a_column, b, b_row, c, c_row, add); break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if BLOCK_ROWS > 6
    CASE(7) CASE(8)
#endif
#if BLOCK_ROWS > 8
    CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
  }
  /* clang-format on */
}

INLINE Int min_of(Int a, Int b) { return a < b ? a : b; }
INLINE Int max_of(Int a, Int b) { return a > b ? a : b; }
INLINE Int round_up(Int x, Int to) { return (x + to - 1) / to * to; }

/* C (+)= A · B, n rows by `panels` panels of PANEL lanes. A has the strides a_row and a_column; rows of B are b_row
   apart, its panels b_panel. */
static void product(Int n, Int panels, Int depth, const float *a, Int a_row, Int a_column, const float *b, Int b_row,
                    Int b_panel, float *c, Int c_row, int add) {
  for (Int p = 0; p < panels; p++)
    for (Int i = 0; i < n; i += BLOCK_ROWS)
      block_product((int)min_of(BLOCK_ROWS, n - i), PANEL_VECTORS, depth, a + i * a_row, a_row, a_column,
                    b + p * b_panel, b_row, c + i * c_row + p * PANEL, c_row, add);
}

/* The three products of a BAND tile. `base` is the column of the pair (0, 0); `shift` is j − i. Rows of x, out and of
   tables by row are `width` apart, a multiple of LANES. W is zero around the tile; `row` and `column` are its
   strides. */

/* Vectors in the panel that begins at lane p of a row */
INLINE int vectors_at(Int p, Int width) { return (int)min_of(PANEL_VECTORS, (width - p) / LANES); }

/* tile[i][j] += x_i · table[base + j − i]; the table in panels of PANEL columns, [columns / PANEL][d][PANEL] */
static void add_band_products(Int n, Int m, Int d, const float *x, Int width, const float *table, Int base,
                              float *tile) {
  for (Int p = (base - n - PANEL) / PANEL; p <= (base + m) / PANEL; p++) {
    const Int shift = p * PANEL - base; /* of the panel's first lane */
    for (Int i = 0; i < n; i += BLOCK_ROWS) {
      const Int rows = min_of(BLOCK_ROWS, n - i);
      if (shift + PANEL - 1 + i + rows - 1 < 0 || shift + i >= m) continue;
      block_product((int)rows, PANEL_VECTORS, d, x + i * width, width, 1, table + p * d * PANEL, PANEL,
                    tile + i * (TILE_STRIDE + 1) + shift, TILE_STRIDE + 1, 1);
    }
  }
}

/* out_i += Σ_j W[i][j] · table[base + j − i]. With the strides exchanged and step −1 it is
   out_j += Σ_i W[i][j] · table[base + j − i]. */
static void add_band_sums(Int n, Int m, Int width, const float *w, Int row, Int column, const float *table, Int base,
                          Int step, float *out) {
  for (Int p = 0; p < width; p += PANEL)
    for (Int i = 0; i < n; i += BLOCK_ROWS) {
      const Int rows = min_of(BLOCK_ROWS, n - i), shift = -(i + rows - 1); /* the smallest that these rows need */
      block_product((int)rows, vectors_at(p, width), m + rows - 1, w + i * (row + column) + shift * column,
                    row + column, column, table + (base + step * shift) * width + p, step * width, out + i * width + p,
                    width, 1);
    }
}

/* table[base + shift] += Σ_i W[i][i + shift] · x_i for every shift in the tile. With the strides exchanged and step −1
   it is table[base − shift] += Σ_j W[j + shift][j] · x_j. */
static void collect_band(Int n, Int m, Int width, const float *w, Int row, Int column, const float *x, Int base,
                         Int step, float *table) {
  for (Int p = 0; p < width; p += PANEL)
    for (Int shift = 1 - n; shift < m; shift += BLOCK_ROWS) {
      const Int rows = min_of(BLOCK_ROWS, m - shift), from = max_of(0, -(shift + rows - 1)), to = min_of(n, m - shift);
      block_product((int)rows, vectors_at(p, width), to - from, w + from * (row + column) + shift * column, column,
                    row + column, x + from * width + p, width, table + (base + step * shift) * width + p, step * width,
                    1);
    }
}

/* tile[i][j] += transposed[j][i]. Blocks of LANES × LANES are transposed in registers, in log2(LANES) steps; in each,
   lanes of rows u and u + LANES/2 alternate. */
static void add_transposed(Int n, Int m, float *tile, const float *transposed) {
  for (Int i = 0; i < n; i += LANES)
    for (Int j = 0; j < m; j += LANES) {
      vec a[LANES], b[LANES];
#pragma GCC unroll 16
      for (int u = 0; u < LANES; u++) a[u] = load(transposed + (j + u) * TILE_STRIDE + i);
#pragma GCC unroll 4
      for (int step = 1; step < LANES; step *= 2) {
#pragma GCC unroll 8
        for (int u = 0; u < LANES / 2; u++) {
          b[2 * u] = ALTERNATE_LOW(a[u], a[u + LANES / 2]);
          b[2 * u + 1] = ALTERNATE_HIGH(a[u], a[u + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int u = 0; u < LANES; u++) a[u] = b[u];
      }
#pragma GCC unroll 16
      for (int u = 0; u < LANES; u++) {
        float *to = tile + (i + u) * TILE_STRIDE + j;
        store(to, load(to) + a[u]);
      }
    }
}

/* tile[i][j] = Σ_d x_i[d] · y_j[d] · table[base + j − i][d]; y in panels of PANEL keys, the table as [d][table_row] */
static void gain_band_products(Int n, Int m, Int d, const float *x, Int width, const float *y, const float *table,
                               Int table_row, Int base, float *tile) {
  for (Int j = 0; j < m; j += PANEL)
    for (Int i = 0; i < n; i += 4) { /* rows from n on exist, and their results are not used */
      vec acc[4][PANEL_VECTORS] = {{{0}}};
      const float *yy = y + j * d, *g = table + base + j - i;
      for (Int k = 0; k < d; k++, yy += PANEL, g += table_row) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
          for (int u = 0; u < PANEL_VECTORS; u++)
            acc[r][u] += broadcast(x[(i + r) * width + k]) * load(g - r + u * LANES) * load(yy + u * LANES);
      }
      for (int r = 0; r < 4; r++)
        for (int u = 0; u < PANEL_VECTORS; u++) store(tile + (i + r) * TILE_STRIDE + j + u * LANES, acc[r][u]);
    }
}

INLINE float dot(Int width, const float *x, const float *y) {
  vec sum = {0};
  for (Int k = 0; k < width; k += LANES) sum += load(x + k) * load(y + k);
  return sum_lanes(sum);
}

/* y += w · x */
INLINE void add_scaled(Int width, float w, const float *x, float *y) {
  for (Int k = 0; k < width; k += LANES) store(y + k, load(y + k) + w * load(x + k));
}

INLINE float sum_row(const float *row, Int m) {
  vec sum = {0};
  for (Int j = 0; j < m; j += LANES) sum += load(row + j);
  return sum_lanes(sum);
}

/* ---------------------------------------------------------------- a call */

/* A tensor of up to four dimensions */
typedef struct {
  void *data;
  Int stride[4]; /* in elements */
} View;

typedef struct {
  Int batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  Int query_dim, key_dim;    /* of p and t, and of the tables they meet */
  Int columns, first_offset; /* of the tables */
  Int lowest, highest;       /* the offsets r that are visible; the least and the largest Int where there is no limit */
  Int distance;              /* of distant rotations */
  Int bf16, raw_q_bf16, raw_k_bf16; /* what is not in bfloat16 is in float32 */
  Int threads;
  Int vector_gain; /* gain is [heads, columns, head_dim], not [heads, columns] */
  Int seed;
  double scale, dropout;
  double softcap; /* 0 if there is none */
  View q, k, v;
  View raw_q, raw_k;         /* p and t; data NULL where they are q and k */
  View left, right, distant; /* queries and keys of distant rotations, as q and k; data NULL if there are none */
  View query_level, key_level, temperature; /* e, d, τ: [batch, heads, tokens], float64; data NULL if not used */
  View out;                                 /* float32, whatever the rest is: the backward pass starts from it */
  View mask;                                /* bytes, strides 0 where it broadcasts; data NULL if there is none */
  const Int *q_pos, *k_pos;
  Int q_pos_stride, k_pos_stride;                         /* from row to row of the batch, 0 if all are alike */
  const float *bias, *gain, *query, *key, *value, *level; /* contiguous, NULL if not used */
  Int bias_heads, gain_heads, query_heads, key_heads, value_heads, level_heads; /* 1 or heads */
  const float *sinks;                                                           /* [heads], NULL if there are none */
  float *lse; /* [batch, heads, queries, 2]: the largest logit, and the logarithm of Σ_j exp(logit − largest); the sink
                 is one of the logits. NULL if no backward pass follows. */
  View grad; /* of the output, float32 */
  View dq, dk, dv, draw_q, draw_k, dleft, dright, ddistant, dquery_level, dkey_level, dtemperature;
  float *dbias, *dgain, *dquery, *dkey, *dvalue, *dlevel; /* as the tables; zero on entry */
  float *dsinks;                                          /* [batch, heads], to be summed over the batch */
} Call;

Int locant_call_size(void) { return sizeof(Call); }

Int locant_lanes(void) { return LANES; }

/* Sizes rounded up to whole panels, of p and t to whole vectors: rows are this long in memory, the rest is 0 */
#define HEAD_WIDTH(call) round_up((call)->head_dim, PANEL)
#define VALUE_WIDTH(call) round_up((call)->value_dim, PANEL)
#define QUERY_WIDTH(call) ((call)->raw_q.data ? round_up((call)->query_dim, LANES) : HEAD_WIDTH(call))
#define KEY_WIDTH(call) ((call)->raw_k.data ? round_up((call)->key_dim, LANES) : HEAD_WIDTH(call))
#define HAS_LEVELS(call) ((call)->query_level.data || (call)->key_level.data)
#define PADDED_KEYS(call) round_up((call)->keys, TILE)
#define PADDED_QUERIES(call) round_up((call)->queries, TILE)
/* Tables have COLUMN_PADDING more columns on either side: copies of the column at that end */
#define COLUMN_PADDING round_up(2 * TILE + 2 * PANEL, PANEL)
#define PADDED_COLUMNS(call) round_up((call)->columns + 2 * COLUMN_PADDING, PANEL)
#define GAIN_ROW(call) (PADDED_COLUMNS(call) + 3 * LANES) /* not a multiple of a page */
/* A tile in memory has zeros around it; INTERIOR is its first element */
#define TILE_ROWS (TILE + 2 * BLOCK_ROWS)
#define TILE_FLOATS (TILE_ROWS * TILE_STRIDE + 2 * MARGIN)
#define INTERIOR(tile) ((tile) + BLOCK_ROWS * TILE_STRIDE + MARGIN)

/* Whether any table differs from head to head */
static int tables_per_head(const Call *call) {
  return call->bias_heads > 1 || call->gain_heads > 1 || call->query_heads > 1 || call->key_heads > 1 ||
         call->value_heads > 1 || call->level_heads > 1;
}

/* A place in memory that is only there where it is used */
#define OFFSET(memory, by) ((memory) ? (memory) + (by) : NULL)

/* Memory handed out in parts. With data NULL it only counts, so that the whole can be allocated at once. */
typedef struct {
  float *data;
  Int used;
} Arena;

static float *allocate(Arena *arena, Int n) {
  float *at = arena->data ? arena->data + arena->used : NULL;
  arena->used += round_up(n, 64);
#ifdef __SANITIZE_ADDRESS__ /* a gap between parts, which nothing may read or write */
  if (at) ASAN_POISON_MEMORY_REGION(at + round_up(n, 2), (size_t)(4 * (round_up(n, 64) + 64 - round_up(n, 2))));
  arena->used += 64;
#endif
  return at;
}

static float *allocate_zeros(Int n) {
  float *p = aligned_alloc(256, (size_t)round_up(4 * n + 256, 256));
  if (p) memset(p, 0, (size_t)(4 * n));
  return p;
}

INLINE float read_value(const void *p, Int at, Int bf16) {
  if (!bf16) return ((const float *)p)[at];
  const uint32_t bits = (uint32_t)((const uint16_t *)p)[at] << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

INLINE void write_value(void *p, Int at, Int bf16, float x) {
  if (!bf16) {
    ((float *)p)[at] = x;
    return;
  }
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000)
    bits |= 0x400000; /* NaN stays NaN */
  else
    bits += 0x7fff + ((bits >> 16) & 1); /* to nearest, ties to even */
  ((uint16_t *)p)[at] = (uint16_t)(bits >> 16);
}

/* Rows [n][width] of a head; does not write the padding, which is 0 */
static void read_rows(const View *x, Int bf16, Int b, Int h, Int from, Int n, Int d, Int width, float *rows) {
  const Int base = b * x->stride[0] + h * x->stride[1];
  for (Int i = 0; i < n; i++) {
    const Int at = base + (from + i) * x->stride[2];
    if (!bf16 && x->stride[3] == 1)
      memcpy(rows + i * width, (const float *)x->data + at, (size_t)(4 * d));
    else if (bf16 && x->stride[3] == 1) /* a case of its own, which the compiler vectorizes */
      for (Int k = 0; k < d; k++) rows[i * width + k] = read_value(x->data, at + k, 1);
    else
      for (Int k = 0; k < d; k++) rows[i * width + k] = read_value(x->data, at + k * x->stride[3], bf16);
  }
}

static void write_rows(const View *x, Int bf16, Int b, Int h, Int from, Int n, Int d, Int width, const float *rows) {
  const Int base = b * x->stride[0] + h * x->stride[1];
  for (Int i = 0; i < n; i++)
    for (Int k = 0; k < d; k++)
      write_value(x->data, base + (from + i) * x->stride[2] + k * x->stride[3], bf16, rows[i * width + k]);
}

/* Levels are read as two floats each, high + low. The sum of two is (e_high + d_high) + (e_low + d_low): its error is at
   most 2^-23 · |e + d| + 2^-46 · max(|e|, |d|). Levels of 10^5 tokens may be large and nearly cancel; what they differ by
   keeps the precision of float32. `low` may be NULL. */
static void read_numbers(const View *x, Int b, Int h, Int from, Int n, float *high, float *low) {
  const double *at = (const double *)x->data + b * x->stride[0] + h * x->stride[1] + from * x->stride[2];
  for (Int i = 0; i < n; i++) {
    const double value = at[i * x->stride[2]];
    high[i] = (float)value;
    if (low) low[i] = isfinite(high[i]) ? (float)(value - high[i]) : 0;
  }
}

static void write_numbers(const View *x, Int b, Int h, Int n, const double *numbers) {
  double *at = (double *)x->data + b * x->stride[0] + h * x->stride[1];
  for (Int i = 0; i < n; i++) at[i * x->stride[2]] = numbers[i];
}

/* Rows [n][width] as panels of PANEL rows, [n / PANEL][d][PANEL]; rows from n on are 0 */
static void into_panels(Int n, Int d, Int width, const float *rows, float *panels) {
  for (Int p = 0; p < round_up(n, PANEL); p += PANEL)
    for (Int k = 0; k < d; k++)
      for (Int l = 0; l < PANEL; l++) panels[p * d + k * PANEL + l] = p + l < n ? rows[(p + l) * width + k] : 0;
}

/* ---------------------------------------------------------------- tables */

/* One head's tables over PADDED_COLUMNS columns; NULL if not used. Vectors as rows [columns][width] and as panels of
   columns [columns / PANEL][d][PANEL]. The panels of `key` are in reverse order, because its products are added to a
   transposed tile. */
typedef struct {
  float *bias, *gain, *level;
  float *gain_rows, *gain_columns; /* a vector gain: as rows, and as [d][GAIN_ROW] */
  float *query_rows, *query_panels, *key_rows, *key_panels, *value_rows, *value_panels;
} Tables;

static void allocate_tables(const Call *call, int backward, Arena *arena, Tables *tables) {
  const Int columns = PADDED_COLUMNS(call), d = call->head_dim, width = HEAD_WIDTH(call);
  memset(tables, 0, sizeof *tables);
  if (call->bias) tables->bias = allocate(arena, columns);
  if (call->level) tables->level = allocate(arena, columns);
  if (call->gain && !call->vector_gain) tables->gain = allocate(arena, columns);
  if (call->gain && call->vector_gain) {
    tables->gain_rows = allocate(arena, columns * width);
    tables->gain_columns = allocate(arena, GAIN_ROW(call) * d + 8 * PANEL);
  }
  if (call->query) {
    tables->query_rows = allocate(arena, columns * QUERY_WIDTH(call));
    tables->query_panels = allocate(arena, columns * call->query_dim);
  }
  if (call->key) {
    tables->key_rows = allocate(arena, columns * KEY_WIDTH(call));
    tables->key_panels = allocate(arena, columns * call->key_dim);
  }
  if (call->value) tables->value_rows = allocate(arena, columns * VALUE_WIDTH(call));
  if (call->value && backward) tables->value_panels = allocate(arena, columns * call->value_dim);
}

/* Rows [columns][d] of a table with the first and the last one repeated outwards */
static void extend_table(const Call *call, const float *table, Int d, Int width, float *rows) {
  for (Int e = 0; e < PADDED_COLUMNS(call); e++) {
    const Int column = max_of(0, min_of(e - COLUMN_PADDING, call->columns - 1));
    memcpy(rows + e * width, table + column * d, (size_t)(4 * d));
  }
}

/* A table of head h; `size` numbers in a column */
#define OF_HEAD(name, size) (call->name + (call->name##_heads == 1 ? 0 : h) * call->columns * (size))

static void fill_tables(const Call *call, Int h, Tables *tables) {
  const Int columns = PADDED_COLUMNS(call), d = call->head_dim, dv = call->value_dim;
  const Int width = HEAD_WIDTH(call), value_width = VALUE_WIDTH(call);
  if (tables->bias) extend_table(call, OF_HEAD(bias, 1), 1, 1, tables->bias);
  if (tables->gain) extend_table(call, OF_HEAD(gain, 1), 1, 1, tables->gain);
  if (tables->level) extend_table(call, OF_HEAD(level, 1), 1, 1, tables->level);
  if (tables->gain_rows) {
    extend_table(call, OF_HEAD(gain, d), d, width, tables->gain_rows);
    for (Int k = 0; k < d; k++)
      for (Int e = 0; e < columns; e++) tables->gain_columns[k * GAIN_ROW(call) + e] = tables->gain_rows[e * width + k];
  }
  if (tables->query_rows) {
    const Int size = call->query_dim, query_width = QUERY_WIDTH(call);
    extend_table(call, OF_HEAD(query, size), size, query_width, tables->query_rows);
    into_panels(columns, size, query_width, tables->query_rows, tables->query_panels);
  }
  if (tables->key_rows) {
    const Int size = call->key_dim, key_width = KEY_WIDTH(call);
    extend_table(call, OF_HEAD(key, size), size, key_width, tables->key_rows);
    into_panels(columns, size, -key_width, tables->key_rows + (columns - 1) * key_width, tables->key_panels);
  }
  if (tables->value_rows) extend_table(call, OF_HEAD(value, dv), dv, value_width, tables->value_rows);
  if (tables->value_panels) into_panels(columns, dv, value_width, tables->value_rows, tables->value_panels);
}

/* ---------------------------------------------------------------- tiles */

/* Positions of a run of tokens */
typedef struct {
  Int min, max, first;
  int consecutive; /* they go up by one from token to token */
} Span;

static Span find_span(const Int *pos, Int n) {
  Span s = {pos[0], pos[0], pos[0], 1};
  for (Int i = 1; i < n; i++) {
    s.min = min_of(s.min, pos[i]), s.max = max_of(s.max, pos[i]);
    s.consecutive &= pos[i] == pos[i - 1] + 1;
  }
  return s;
}

static void find_spans(const Int *pos, Int n, Span *spans) {
  for (Int at = 0; at < n; at += TILE) spans[at / TILE] = find_span(pos + at, min_of(TILE, n - at));
}

typedef enum { SKIP, FAR, BAND, SCATTER } Kind;

/* Which queries and keys a content product is made of */
typedef enum { NEAR = 1, LEFT = 2, RIGHT = 4 } Part;

typedef struct {
  Kind kind;
  int some_hidden; /* some pair is not visible */
  int parts;       /* that visible pairs need, as bits; perhaps one more in a SCATTER tile */
  Int b, h;        /* sequence and query head */
  Int first_query, queries, first_key, keys;
  Int column;               /* BAND: of the pair (0, 0). FAR: of every pair. Counted with COLUMN_PADDING. */
  int far_end;              /* FAR: at which end of the tables, 0 or 1 */
  const Int *q_pos, *k_pos; /* of the tile's first query and key */
} Tile;

INLINE int is_visible(const Call *call, const Tile *tile, Int i, Int j) {
  const Int r = tile->k_pos[j] - tile->q_pos[i];
  if (r < call->lowest || r > call->highest) return 0;
  const View *x = &call->mask;
  return !x->data ||
         ((const uint8_t *)x->data)[tile->b * x->stride[0] + tile->h * x->stride[1] +
                                    (tile->first_query + i) * x->stride[2] + (tile->first_key + j) * x->stride[3]];
}

/* How many pairs of a tile the mask allows, out of *of; a mask that is the same for all queries is read once */
static Int count_allowed(const Call *call, const Tile *tile, Int *of) {
  const View *x = &call->mask;
  const Int rows = x->stride[2] ? tile->queries : 1;
  const uint8_t *bytes = (const uint8_t *)x->data + tile->b * x->stride[0] + tile->h * x->stride[1] +
                         tile->first_query * x->stride[2] + tile->first_key * x->stride[3];
  Int allowed = 0;
  for (Int i = 0; i < rows; i++)
    for (Int j = 0; j < tile->keys; j++) allowed += bytes[i * x->stride[2] + j * x->stride[3]] != 0;
  *of = rows * tile->keys;
  return allowed;
}

/* The parts of pairs with offsets from least to largest */
INLINE int parts_between(const Call *call, Int least, Int largest) {
  if (!call->distant.data) return NEAR;
  return (least < -call->distance ? LEFT : 0) | (largest > call->distance ? RIGHT : 0) |
         (largest >= -call->distance && least <= call->distance ? NEAR : 0);
}

/* to[i][j] = from[i][j] for the pairs of one part; 0 for the others if `clear`, unchanged if not */
static void select_part(const Call *call, const Tile *tile, int part, const float *from, float *to, int clear) {
  for (Int i = 0; i < tile->queries; i++)
    for (Int j = 0; j < tile->keys; j++) {
      const Int at = i * TILE_STRIDE + j, r = tile->k_pos[j] - tile->q_pos[i];
      if (parts_between(call, r, r) == part)
        to[at] = from[at];
      else if (clear)
        to[at] = 0;
    }
}

/* The tile that begins at a query and a key, with its kind */
static Tile make_tile(const Call *call, Int b, Int h, Int first_query, Int first_key, const Span *q_spans,
                      const Span *k_spans) {
  Tile tile = {.kind = SKIP,
               .b = b,
               .h = h,
               .first_query = first_query,
               .queries = min_of(TILE, call->queries - first_query),
               .first_key = first_key,
               .keys = min_of(TILE, call->keys - first_key)};
  const Span *q = q_spans + first_query / TILE, *k = k_spans + first_key / TILE;
  tile.q_pos = call->q_pos + b * call->q_pos_stride + first_query;
  tile.k_pos = call->k_pos + b * call->k_pos_stride + first_key;
  const Int least = k->min - q->max, largest = k->max - q->min; /* of the offsets of the tile */
  if (least > call->highest || largest < call->lowest) return tile;
  tile.some_hidden = least < call->lowest || largest > call->highest;
  tile.parts = parts_between(call, max_of(least, call->lowest), min_of(largest, call->highest));
  if (call->mask.data) {
    Int pairs;
    const Int allowed = count_allowed(call, &tile, &pairs);
    if (!allowed) return tile;
    tile.some_hidden |= allowed < pairs;
  }
  /* The columns of the smallest and the largest offset, which may lie beyond the tables */
  const Int low = least - call->first_offset, high = largest - call->first_offset;
  if (!(call->bias || call->gain || call->query || call->key || call->value || call->level) || high <= 0)
    tile.kind = FAR, tile.far_end = 0, tile.column = COLUMN_PADDING;
  else if (low >= call->columns - 1)
    tile.kind = FAR, tile.far_end = 1, tile.column = COLUMN_PADDING + call->columns - 1;
  else if (q->consecutive && k->consecutive)
    tile.kind = BAND, tile.column = COLUMN_PADDING + k->first - q->first - call->first_offset;
  else
    tile.kind = SCATTER;
  return tile;
}

/* The column of a pair of a SCATTER tile */
INLINE Int column_of(const Call *call, const Tile *tile, Int i, Int j) {
  const Int column = tile->k_pos[j] - tile->q_pos[i] - call->first_offset;
  return COLUMN_PADDING + max_of(0, min_of(column, call->columns - 1));
}

/* The numbers of a table for the pairs of query i with keys j … j + LANES − 1 */
INLINE vec numbers_at(const Call *call, const Tile *tile, const float *table, Int i, Int j) {
  if (tile->kind == BAND) return load(table + tile->column + j - i);
  if (tile->kind == FAR) return broadcast(table[tile->column]);
  vec x = {0};
  for (int l = 0; l < LANES && j + l < tile->keys; l++) x[l] = table[column_of(call, tile, i, j + l)];
  return x;
}

/* ---------------------------------------------------------------- logits */

/* The tensors that a tile is computed from; pointers are to the tile's own first row */
typedef struct {
  const float *q, *k;                         /* rows of HEAD_WIDTH */
  const float *left, *right, *distant_panels; /* as q and k_panels; NULL if there are none */
  const float *raw_q, *raw_k;                 /* rows of QUERY_WIDTH and of KEY_WIDTH */
  const float *k_panels;                      /* [m / PANEL][d][PANEL] */
  const float *far_query_term[2];             /* raw_q · query at either end of the table */
  const float *far_key_term[2];               /* raw_k · key at either end of the table */
  const float *query_level[2], *key_level[2]; /* high and low parts; zeros where there are levels of the others alone */
  const float *temperature;                   /* NULL if there are none */
  const Tables *tables;
  float *transposed; /* memory for a transposed tile */
  float *scaled_q;   /* memory for rows of q times a vector gain */
  float *untempered; /* memory for the logits before the temperature, whose gradient needs them; NULL if not needed */
  float *slope;      /* memory for the derivative of the softcap; NULL if not needed */
} Operands;

/* e_i + d_j of query i and keys j … j + LANES − 1; see `read_numbers` */
INLINE vec levels_at(const Operands *in, Int i, Int j) {
  return (in->query_level[0][i] + load(in->key_level[0] + j)) + (in->query_level[1][i] + load(in->key_level[1] + j));
}

/* The last step of a logit: levels and temperature. `level` are the numbers of that table. */
INLINE vec finish(const Operands *in, Int i, Int j, const int levels, vec level, vec x) {
  if (levels) x += level * levels_at(in, i, j);
  if (!in->temperature) return x;
  if (in->untempered) store(in->untempered + i * TILE_STRIDE + j, x);
  return x * in->temperature[i];
}

/* tile = q · kᵀ, each pair with the queries and keys of its part. The first part fills the tile, the others replace their
   pairs in it. */
static void content_products(const Call *call, const Tile *tile, const float *q, const Operands *in, float *logits) {
  float *to = logits;
  for (int part = NEAR; part <= RIGHT; part *= 2) {
    if (!(tile->parts & part)) continue;
    const float *queries = part == NEAR ? q : part == LEFT ? in->left : in->right;
    const float *keys = part == NEAR ? in->k_panels : in->distant_panels;
    product(tile->queries, round_up(tile->keys, PANEL) / PANEL, call->head_dim, queries, HEAD_WIDTH(call), 1, keys,
            PANEL, call->head_dim * PANEL, to, TILE_STRIDE, 0);
    if (to != logits) select_part(call, tile, part, to, logits, 0);
    to = in->transposed; /* not in use yet */
  }
}

/* `content`, if not NULL, gets a copy of the content products before a scalar gain: its gradient needs them */
static void keep_content(const Tile *tile, const float *logits, float *content) {
  if (!content) return;
  for (Int i = 0; i < tile->queries; i++)
    memcpy(content + i * TILE_STRIDE, logits + i * TILE_STRIDE, (size_t)(4 * round_up(tile->keys, LANES)));
}

/* One column serves all pairs: a number for the bias and a scalar gain, a vector over queries or keys for the rest */
static void far_logits(const Call *call, const Tile *tile, const Operands *in, float *logits, float *content) {
  const Int n = tile->queries, m = tile->keys, width = HEAD_WIDTH(call), column = tile->column;
  const Tables *tables = in->tables;
  const float *q = in->q;
  if (tables->gain_rows) {
    const float *gain = tables->gain_rows + column * width;
    for (Int i = 0; i < n; i++)
      for (Int x = 0; x < width; x += LANES)
        store(in->scaled_q + i * width + x, load(q + i * width + x) * load(gain + x));
    q = in->scaled_q;
  }
  content_products(call, tile, q, in, logits);
  keep_content(tile, logits, content);
  const float scale = (float)call->scale;
  const float *key_term = tables->key_rows ? in->far_key_term[tile->far_end] : NULL;
  const int levels = HAS_LEVELS(call);
  const vec level = broadcast(tables->level ? tables->level[column] : 1);
  for (Int i = 0; i < n; i++) {
    const float query_term = tables->query_rows ? in->far_query_term[tile->far_end][i] : 0;
    float *row = logits + i * TILE_STRIDE;
    for (Int j = 0; j < m; j += LANES) {
      vec x = load(row + j);
      if (tables->gain) x *= broadcast(tables->gain[column]);
      x += query_term;
      if (key_term) x += load(key_term + j);
      x *= scale;
      if (tables->bias) x += broadcast(tables->bias[column]);
      store(row + j, finish(in, i, j, levels, level, x));
    }
  }
}

/* Pair (i, j) needs the column j − i after that of pair (0, 0) */
static void band_logits(const Call *call, const Tile *tile, const Operands *in, float *logits, float *content) {
  const Int n = tile->queries, m = tile->keys, d = call->head_dim, width = HEAD_WIDTH(call), base = tile->column;
  const Tables *tables = in->tables;
  if (tables->gain_rows)
    gain_band_products(n, m, d, in->q, width, in->k_panels, tables->gain_columns, GAIN_ROW(call), base, logits);
  else
    content_products(call, tile, in->q, in, logits);
  keep_content(tile, logits, content);
  /* A gain multiplies the content products alone. If products with vectors follow, it comes before them; if not, it is
     cheaper in the last loop. */
  const int gain_first = tables->gain && (tables->query_panels || tables->key_panels);
  if (gain_first)
    for (Int i = 0; i < n; i++)
      for (Int j = 0; j < m; j += LANES) {
        float *at = logits + i * TILE_STRIDE + j;
        store(at, load(at) * load(tables->gain + base + j - i));
      }
  if (tables->query_panels)
    add_band_products(n, m, call->query_dim, in->raw_q, QUERY_WIDTH(call), tables->query_panels, base, logits);
  if (tables->key_panels) {
    for (Int j = 0; j < m; j++) memset(in->transposed + j * TILE_STRIDE, 0, 4 * TILE);
    add_band_products(m, n, call->key_dim, in->raw_k, KEY_WIDTH(call), tables->key_panels,
                      PADDED_COLUMNS(call) - 1 - base, in->transposed);
    add_transposed(n, m, logits, in->transposed);
  }
  const float scale = (float)call->scale;
  const float *gain = gain_first ? NULL : tables->gain;
  const int levels = HAS_LEVELS(call);
  for (Int i = 0; i < n; i++) {
    float *row = logits + i * TILE_STRIDE;
    for (Int j = 0; j < m; j += LANES) {
      vec x = load(row + j);
      if (gain) x *= load(gain + base + j - i);
      x *= scale;
      if (tables->bias) x += load(tables->bias + base + j - i);
      const vec level = tables->level ? load(tables->level + base + j - i) : broadcast(1);
      store(row + j, finish(in, i, j, levels, level, x));
    }
  }
}

/* Each pair finds its own column */
static void scatter_logits(const Call *call, const Tile *tile, const Operands *in, float *logits, float *content) {
  const Int n = tile->queries, m = tile->keys, width = HEAD_WIDTH(call);
  const Int query_width = QUERY_WIDTH(call), key_width = KEY_WIDTH(call);
  const Tables *tables = in->tables;
  const float scale = (float)call->scale;
  Int columns[TILE];
  if (!tables->gain_rows) content_products(call, tile, in->q, in, logits);
  for (Int i = 0; i < n; i++) {
    const float *q = in->q + i * width, *raw_q = in->raw_q + i * query_width;
    float *row = logits + i * TILE_STRIDE;
    for (Int j = 0; j < m; j++) columns[j] = column_of(call, tile, i, j);
    if (tables->gain_rows)
      for (Int j = 0; j < m; j++) {
        const float *gain = tables->gain_rows + columns[j] * width, *k = in->k + j * width;
        vec sum = {0};
        for (Int x = 0; x < width; x += LANES) sum += load(q + x) * load(gain + x) * load(k + x);
        row[j] = sum_lanes(sum);
      }
    if (content) memcpy(content + i * TILE_STRIDE, row, (size_t)(4 * round_up(m, LANES)));
    if (tables->gain)
      for (Int j = 0; j < m; j++) row[j] *= tables->gain[columns[j]];
    if (tables->query_rows)
      for (Int j = 0; j < m; j++) row[j] += dot(query_width, raw_q, tables->query_rows + columns[j] * query_width);
    if (tables->key_rows)
      for (Int j = 0; j < m; j++)
        row[j] += dot(key_width, in->raw_k + j * key_width, tables->key_rows + columns[j] * key_width);
    for (Int j = 0; j < m; j++) row[j] = scale * row[j] + (tables->bias ? tables->bias[columns[j]] : 0);
    for (Int j = 0; j < m; j += LANES) {
      const vec level = tables->level ? numbers_at(call, tile, tables->level, i, j) : broadcast(1);
      store(row + j, finish(in, i, j, HAS_LEVELS(call), level, load(row + j)));
    }
  }
}

/* logit = softcap · tanh(logit / softcap). Its derivative, 1 − tanh², is computed as 4e / (1 + e)² with e = exp(−2|x|):
   where tanh is nearly 1, the difference would consist of rounding. */
static void cap_logits(const Call *call, const Tile *tile, float *slope, float *logits) {
  const float cap = (float)call->softcap, inverse = (float)(1 / call->softcap);
  for (Int i = 0; i < tile->queries; i++)
    for (Int j = 0; j < tile->keys; j += LANES) {
      float *at = logits + i * TILE_STRIDE + j;
      const vec x = load(at) * inverse;
      store(at, cap * tanh_lanes(x));
      if (!slope) continue;
      const vec e = exp_lanes((vec)((ivec)x & INT32_MAX) * -2.0f), below = 1.0f + e;
      store(slope + i * TILE_STRIDE + j, 4.0f * e / (below * below));
    }
}

/* The logits of a tile, −∞ where hidden and in the lanes from m on. The memory around the tile holds any values.
   `content`: see `keep_content`. */
static void tile_logits(const Call *call, const Tile *tile, const Operands *in, float *logits, float *content) {
  const Int n = tile->queries, m = tile->keys;
  if (tile->kind == FAR) far_logits(call, tile, in, logits, content);
  if (tile->kind == BAND) band_logits(call, tile, in, logits, content);
  if (tile->kind == SCATTER) scatter_logits(call, tile, in, logits, content);
  if (call->softcap > 0) cap_logits(call, tile, in->slope, logits);
  for (Int i = 0; i < n; i++)
    for (Int j = m; j < round_up(m, LANES); j++) logits[i * TILE_STRIDE + j] = -INFINITY;
  if (tile->some_hidden)
    for (Int i = 0; i < n; i++)
      for (Int j = 0; j < m; j++)
        if (!is_visible(call, tile, i, j)) logits[i * TILE_STRIDE + j] = -INFINITY;
}

/* ---------------------------------------------------------------- tiles without weight */

/* exp_lanes(x) is 0 below −87.34. The rest is room for the rounding of logits. */
#define VANISHING 100

/* Whether the logits of a call have the bound that `vanishes` computes, and no value table, which may not be finite */
static int has_bound(const Call *call) {
  const int falls = call->bias || call->level || HAS_LEVELS(call) || (call->gain && !call->vector_gain);
  return falls && !(call->gain && call->vector_gain) && !call->query && !call->key && !call->value &&
         !call->temperature.data && !call->distant.data && call->softcap == 0;
}

/* The lengths of rows, a little too large, as a sum is rounded; not finite if a row is not. Squares underflow only where
   the length of a key that outweighs them overflows. */
static void find_norms(Int n, Int width, const float *rows, float *norms) {
  const float larger_by = 1.0001f + 1e-7f * (float)width;
  for (Int i = 0; i < n; i++) norms[i] = larger_by * sqrtf(dot(width, rows + i * width, rows + i * width));
}

/* The length of the longest key of each tile; NaN if a key or a value is not finite, because 0 · ∞ is not 0 */
static void find_longest_keys(const Call *call, const float *k, const float *v, float *longest) {
  const Int width = HEAD_WIDTH(call), value_width = VALUE_WIDTH(call);
  for (Int first = 0; first < call->keys; first += TILE) {
    const Int m = min_of(TILE, call->keys - first);
    float norms[TILE], most = 0;
    vec nothing = {0};
    find_norms(m, width, k + first * width, norms);
    for (Int j = 0; j < m; j++) most = norms[j] > most ? norms[j] : most, nothing += norms[j] * 0.0f;
    for (Int x = first * value_width; x < (first + m) * value_width; x += LANES) nothing += load(v + x) * 0.0f;
    longest[first / TILE] = most + sum_lanes(nothing);
  }
}

typedef struct {
  double least, most;
} Range;

/* The range of a table over the columns of a FAR or BAND tile; NaN if a number is not finite */
static Range range_of(const Tile *tile, const float *table) {
  const Int before = tile->kind == BAND ? tile->queries - 1 : 0, after = tile->kind == BAND ? tile->keys - 1 : 0;
  float least = INFINITY, most = -INFINITY, nothing = 0;
  for (const float *x = table + tile->column - before; x <= table + tile->column + after; x++) {
    least = *x < least ? *x : least, most = *x > most ? *x : most;
    nothing += *x * 0.0f;
  }
  return (Range){least + nothing, most + nothing};
}

/* The range of the levels of a tile's keys, in the same way */
static Range range_of_key_levels(const Tile *tile, const Operands *in) {
  double least = INFINITY, most = -INFINITY, nothing = 0;
  for (Int j = 0; j < tile->keys; j++) {
    const double d = (double)in->key_level[0][j] + in->key_level[1][j];
    least = d < least ? d : least, most = d > most ? d : most;
    nothing += d * 0;
  }
  return (Range){least + nothing, most + nothing};
}

INLINE double largest_size(Range x) { return fmax(fabs(x.least), fabs(x.most)); }

/* Whether exp(logit − floor) is 0 in float32 for every pair of a tile, whatever the mask is.

     logit_ij  ≤  |scale| · |q_i| · |longest k_j| · max |gain|  +  max bias  +  max of level · (e_i + d_j)

   floors: for each query a number that its largest logit is not below; with stride 2 the sum of two. A comparison with
   NaN is false, so numbers that are not finite make no tile vanish. */
static int vanishes(const Call *call, const Tile *tile, const Operands *in, const float *norms, float longest,
                    const float *floors, Int stride) {
  const Tables *tables = in->tables;
  if (tile->kind == SCATTER) return 0;
  const Range zero = {0, 0}, one = {1, 1};
  const Range bias = tables->bias ? range_of(tile, tables->bias) : zero;
  const Range gain = tables->gain ? range_of(tile, tables->gain) : one;
  const Range level = tables->level ? range_of(tile, tables->level) : one;
  const Range keys = call->key_level.data ? range_of_key_levels(tile, in) : zero;
  const double content = fabs(call->scale) * longest * largest_size(gain);
  for (Int i = 0; i < tile->queries; i++) {
    const double e = call->query_level.data ? (double)in->query_level[0][i] + in->query_level[1][i] : 0;
    const double low = e + keys.least, high = e + keys.most;
    const double levels =
        HAS_LEVELS(call) ? fmax(fmax(level.least * low, level.least * high), fmax(level.most * low, level.most * high))
                         : 0;
    const double floor = stride == 2 ? (double)floors[2 * i] + floors[2 * i + 1] : floors[i];
    const double bound = content * norms[i] + bias.most + levels;
    const double sizes = content * norms[i] + largest_size(bias) + largest_size(level) * fmax(fabs(low), fabs(high)) +
                         1e-7 * largest_size(level) * (fabs(e) + largest_size(keys)); /* see `read_numbers` */
    if (!(bound + 1e-5 * (sizes + fabs(floor)) + VANISHING < floor)) return 0; /* rounding is in proportion to sizes */
  }
  return 1;
}

/* x_i · (table at either end), for n rows: the terms of FAR tiles */
static void far_terms(const Call *call, Int n, Int width, const float *x, const float *table, float *const ends[2]) {
  for (Int i = 0; i < n; i++) {
    ends[0][i] = dot(width, x + i * width, table + COLUMN_PADDING * width);
    ends[1][i] = dot(width, x + i * width, table + (COLUMN_PADDING + call->columns - 1) * width);
  }
}

/* Zeros from m to the end of a row of a tile */
INLINE void clear_after(float *row, Int m) {
  if (m < TILE) memset(row + m, 0, (size_t)(4 * (TILE - m)));
}

/* ---------------------------------------------------------------- dropout */

/* A weight is multiplied by 0 or 1 / (1 − p), by a hash of the seed and the pair alone */
typedef struct {
  uint32_t row_hash, limit;
  float scale;
} Dropout;

INLINE uint32_t hash(uint64_t x) {
  x ^= x >> 30, x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27, x *= 0x94d049bb133111ebu;
  return (uint32_t)(x >> 16);
}

INLINE Dropout row_dropout(const Call *call, const Tile *tile, Int i) {
  const uint64_t row = (uint64_t)((tile->b * call->heads + tile->h) * call->queries + tile->first_query + i);
  const double limit = call->dropout * 4294967296.0;
  return (Dropout){hash((uint64_t)call->seed + row * 0x9e3779b97f4a7c15u),
                   limit > 4294967295.0 ? 4294967295u : (uint32_t)limit, (float)(1 / (1 - call->dropout))};
}

/* For keys j … j + LANES − 1 of a row */
INLINE vec dropout_factors(Dropout dropout, Int j) {
  uvec x;
  for (int l = 0; l < LANES; l++) x[l] = (uint32_t)(j + l);
  x = x * 0x9e3779b1u + dropout.row_hash;
  x ^= x >> 16, x *= 0x7feb352du;
  x ^= x >> 15, x *= 0x846ca68bu;
  x ^= x >> 16;
  return (vec)((ivec)(x >= dropout.limit) & (ivec)broadcast(dropout.scale));
}

/* ---------------------------------------------------------------- threads */

static Int thread_count(const Call *call, Int tasks) {
#ifdef _OPENMP
  return max_of(1, min_of(call->threads, tasks));
#else
  return 1;
#endif
}

/* The number of threads in this parallel region. OMP_THREAD_LIMIT, OMP_DYNAMIC or an outer region can make it smaller
   than requested, and the work is divided among those that run. */
static Int team_size(void) {
#ifdef _OPENMP
  return omp_get_num_threads();
#else
  return 1;
#endif
}

static Int thread_number(void) {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

/* The tables of every head; heads share them if no table is per head. NULL if there is not enough memory. */
static Tables *make_tables(const Call *call, int backward, float **memory) {
  const Int heads = tables_per_head(call) ? call->heads : 1;
  Tables *tables = calloc((size_t)call->heads, sizeof(Tables));
  Arena arena = {0};
  Tables one;
  allocate_tables(call, backward, &arena, &one);
  *memory = allocate_zeros(arena.used * heads + 1);
  if (!tables || !*memory) {
    free(tables);
    free(*memory);
    return NULL;
  }
  arena = (Arena){*memory, 0};
  for (Int h = 0; h < heads; h++) allocate_tables(call, backward, &arena, tables + h);
#pragma omp parallel for num_threads(thread_count(call, heads)) schedule(static)
  for (Int h = 0; h < heads; h++) fill_tables(call, h, tables + h);
  for (Int h = heads; h < call->heads; h++) tables[h] = tables[0];
  return tables;
}

/* ---------------------------------------------------------------- forward */

/* The memory of one thread */
typedef struct {
  float *k, *raw_k, *k_panels, *v, *far_key_term[2];          /* of a head */
  float *key_level[2];                                        /* of a head */
  float *q, *raw_q, *far_query_term[2], *out, *largest, *sum; /* of the queries of a tile */
  float *query_level[2], *temperature;                        /* of the queries of a tile */
  float *distant, *distant_panels, *left, *right;             /* of a head, and of the queries of a tile */
  float *logits, *weights, *transposed, *scaled_q;            /* of a tile */
  float *norms, *longest; /* of queries, and of keys by tile; NULL without a bound */
  Span *q_spans, *k_spans;
} Forward;

static void allocate_forward(const Call *call, Arena *arena, Forward *work) {
  const Int width = HEAD_WIDTH(call), value_width = VALUE_WIDTH(call), keys = PADDED_KEYS(call);
  memset(work, 0, sizeof *work);
  work->k = allocate(arena, keys * width);
  work->raw_k = call->raw_k.data ? allocate(arena, keys * KEY_WIDTH(call)) : work->k;
  work->k_panels = allocate(arena, keys * call->head_dim);
  work->v = allocate(arena, keys * value_width);
  for (int end = 0; end < 2; end++)
    work->far_key_term[end] = allocate(arena, keys), work->far_query_term[end] = allocate(arena, TILE);
  for (int part = 0; part < 2 && HAS_LEVELS(call); part++)
    work->key_level[part] = allocate(arena, keys), work->query_level[part] = allocate(arena, TILE);
  if (call->temperature.data) work->temperature = allocate(arena, TILE);
  if (call->distant.data) {
    work->distant = allocate(arena, keys * width), work->distant_panels = allocate(arena, keys * call->head_dim);
    work->left = allocate(arena, (TILE + BLOCK_ROWS) * width);
    work->right = allocate(arena, (TILE + BLOCK_ROWS) * width);
  }
  work->q = allocate(arena, (TILE + BLOCK_ROWS) * width);
  work->raw_q = call->raw_q.data ? allocate(arena, (TILE + BLOCK_ROWS) * QUERY_WIDTH(call)) : work->q;
  work->out = allocate(arena, TILE * value_width);
  work->largest = allocate(arena, TILE);
  work->sum = allocate(arena, TILE);
  work->logits = allocate(arena, TILE_FLOATS);
  work->weights = allocate(arena, TILE_FLOATS);
  work->transposed = allocate(arena, TILE_FLOATS);
  work->scaled_q = allocate(arena, (TILE + BLOCK_ROWS) * width);
  if (has_bound(call)) work->norms = allocate(arena, TILE), work->longest = allocate(arena, keys / TILE);
  work->q_spans = (Span *)allocate(arena, (Int)(sizeof(Span) / 4) * (PADDED_QUERIES(call) / TILE));
  work->k_spans = (Span *)allocate(arena, (Int)(sizeof(Span) / 4) * (PADDED_KEYS(call) / TILE));
}

/* The key tile nearest to some queries. Their largest logits are likely there, and tiles after it may vanish. */
static Int nearest_tile(const Call *call, const Span *q, const Span *k_spans) {
  Int nearest = 0, least = INT64_MAX;
  for (Int at = 0; at * TILE < call->keys; at++) {
    const Int distance = max_of(0, max_of(k_spans[at].min - q->max, q->min - k_spans[at].max));
    if (distance < least) nearest = at, least = distance;
  }
  return nearest;
}

/* The weights of a tile, exp(logit − largest), with the largest logit so far. Where a tile has a larger one, sums and
   output of the tiles before are scaled down to it. */
static void add_to_softmax(const Call *call, const Tile *tile, Forward *work, const float *logits, float *weights) {
  const Int value_width = VALUE_WIDTH(call), m = tile->keys;
  for (Int i = 0; i < tile->queries; i++) {
    const float *row = logits + i * TILE_STRIDE;
    float *weight = weights + i * TILE_STRIDE;
    vec top = broadcast(-INFINITY), sum = {0};
    for (Int j = 0; j < m; j += LANES) top = larger(load(row + j), top);
    const float before = work->largest[i], now = fmaxf(before, max_lanes(top));
    if (now == -INFINITY) { /* all hidden, or all NaN */
      for (Int j = 0; j < m; j++)
        if (row[j] != row[j]) work->sum[i] = NAN;
      memset(weight, 0, 4 * TILE);
      continue;
    }
    if (call->dropout > 0) {
      const Dropout dropout = row_dropout(call, tile, i);
      for (Int j = 0; j < m; j += LANES) {
        const vec x = exp_lanes(load(row + j) - now);
        sum += x;
        store(weight + j, x * dropout_factors(dropout, tile->first_key + j));
      }
    } else
      for (Int j = 0; j < m; j += LANES) {
        const vec x = exp_lanes(load(row + j) - now);
        sum += x;
        store(weight + j, x);
      }
    clear_after(weight, m);
    if (before != now) {
      const float shrink = expf(before - now);
      float *out = work->out + i * value_width;
      work->sum[i] *= shrink;
      for (Int x = 0; x < value_width; x += LANES) store(out + x, load(out + x) * shrink);
    }
    work->largest[i] = now;
    work->sum[i] += sum_lanes(sum);
  }
}

/* out_i += Σ_j weight_ij · value_r */
static void add_value_terms(const Call *call, const Tile *tile, const float *weights, const float *value, float *out) {
  const Int n = tile->queries, m = tile->keys, width = VALUE_WIDTH(call);
  if (tile->kind == BAND)
    add_band_sums(n, m, width, weights, TILE_STRIDE, 1, value, tile->column, 1, out);
  else if (tile->kind == FAR)
    for (Int i = 0; i < n; i++)
      add_scaled(width, sum_row(weights + i * TILE_STRIDE, m), value + tile->column * width, out + i * width);
  else
    for (Int i = 0; i < n; i++)
      for (Int j = 0; j < m; j++)
        add_scaled(width, weights[i * TILE_STRIDE + j], value + column_of(call, tile, i, j) * width, out + i * width);
}

/* The output of one query and its `lse`, from the sum of weighted values in `out`, which is overwritten */
static void finish_query(const Call *call, Int b, Int h, Int query, float largest, float sum, float *out) {
  const int sees_nothing = sum == 0;
  for (Int x = 0; x < call->value_dim; x++) out[x] = sees_nothing ? 0 : out[x] / sum;
  write_rows(&call->out, 0, b, h, query, 1, call->value_dim, VALUE_WIDTH(call), out);
  if (!call->lse) return; /* no backward pass follows */
  float *lse = call->lse + ((b * call->heads + h) * call->queries + query) * 2;
  lse[0] = sees_nothing ? INFINITY : largest, lse[1] = sees_nothing ? 0 : logf(sum);
}

/* The output of the queries first_query … first_query + TILE − 1 of a head */
static void forward_queries(const Call *call, Int b, Int h, Int first_query, Forward *work, const Tables *tables) {
  const Int width = HEAD_WIDTH(call), value_width = VALUE_WIDTH(call), n = min_of(TILE, call->queries - first_query);
  float *logits = INTERIOR(work->logits), *weights = INTERIOR(work->weights);
  read_rows(&call->q, call->bf16, b, h, first_query, n, call->head_dim, width, work->q);
  if (call->raw_q.data)
    read_rows(&call->raw_q, call->raw_q_bf16, b, h, first_query, n, call->query_dim, QUERY_WIDTH(call), work->raw_q);
  if (tables->query_rows) far_terms(call, n, QUERY_WIDTH(call), work->raw_q, tables->query_rows, work->far_query_term);
  if (call->distant.data) {
    read_rows(&call->left, call->bf16, b, h, first_query, n, call->head_dim, width, work->left);
    read_rows(&call->right, call->bf16, b, h, first_query, n, call->head_dim, width, work->right);
  }
  if (call->query_level.data)
    read_numbers(&call->query_level, b, h, first_query, n, work->query_level[0], work->query_level[1]);
  if (call->temperature.data) read_numbers(&call->temperature, b, h, first_query, n, work->temperature, NULL);
  memset(work->out, 0, (size_t)(4 * TILE * value_width));
  const float sink = call->sinks ? call->sinks[h] : -INFINITY;
  for (Int i = 0; i < n; i++) work->largest[i] = sink, work->sum[i] = sink == -INFINITY ? 0 : 1;
  if (work->norms) find_norms(n, width, work->q, work->norms);
  const Int nearest = work->norms ? nearest_tile(call, work->q_spans + first_query / TILE, work->k_spans) : 0;
  for (Int number = 0; number * TILE < call->keys; number++) { /* back to the first key, then on to the last */
    const Int at = number <= nearest ? nearest - number : number, first_key = at * TILE;
    const Tile tile = make_tile(call, b, h, first_query, first_key, work->q_spans, work->k_spans);
    if (tile.kind == SKIP) continue;
    const Operands operands = {
        .q = work->q,
        .raw_q = work->raw_q,
        .k_panels = work->k_panels + first_key * call->head_dim,
        .left = work->left,
        .right = work->right,
        .distant_panels = OFFSET(work->distant_panels, first_key * call->head_dim),
        .k = work->k + first_key * width,
        .raw_k = work->raw_k + first_key * KEY_WIDTH(call),
        .far_query_term = {work->far_query_term[0], work->far_query_term[1]},
        .far_key_term = {work->far_key_term[0] + first_key, work->far_key_term[1] + first_key},
        .query_level = {work->query_level[0], work->query_level[1]},
        .key_level = {OFFSET(work->key_level[0], first_key), OFFSET(work->key_level[1], first_key)},
        .temperature = work->temperature,
        .tables = tables,
        .transposed = INTERIOR(work->transposed),
        .scaled_q = work->scaled_q,
    };
    if (work->norms && vanishes(call, &tile, &operands, work->norms, work->longest[at], work->largest, 1)) continue;
    tile_logits(call, &tile, &operands, logits, NULL);
    add_to_softmax(call, &tile, work, logits, weights);
    product(n, value_width / PANEL, tile.keys, weights, TILE_STRIDE, 1, work->v + first_key * value_width, value_width,
            PANEL, work->out, value_width, 1);
    if (tables->value_rows) add_value_terms(call, &tile, weights, tables->value_rows, work->out);
  }
  for (Int i = 0; i < n; i++)
    finish_query(call, b, h, first_query + i, work->largest[i], work->sum[i], work->out + i * value_width);
}

/* Keys, values and positions of a key/value head */
static void read_keys(const Call *call, Int b, Int kv, Forward *work) {
  const Int width = HEAD_WIDTH(call);
  read_rows(&call->k, call->bf16, b, kv, 0, call->keys, call->head_dim, width, work->k);
  if (call->raw_k.data)
    read_rows(&call->raw_k, call->raw_k_bf16, b, kv, 0, call->keys, call->key_dim, KEY_WIDTH(call), work->raw_k);
  read_rows(&call->v, call->bf16, b, kv, 0, call->keys, call->value_dim, VALUE_WIDTH(call), work->v);
  into_panels(call->keys, call->head_dim, width, work->k, work->k_panels);
  if (work->longest) find_longest_keys(call, work->k, work->v, work->longest);
  if (call->distant.data) {
    read_rows(&call->distant, call->bf16, b, kv, 0, call->keys, call->head_dim, width, work->distant);
    into_panels(call->keys, call->head_dim, width, work->distant, work->distant_panels);
  }
  find_spans(call->q_pos + b * call->q_pos_stride, call->queries, work->q_spans);
  find_spans(call->k_pos + b * call->k_pos_stride, call->keys, work->k_spans);
}

/* ---------------------------------------------------------------- few queries */

/* Decoding: one query or a few, and many keys. Nearly all time is reading keys and values from memory, so they are read
   where they are, once, and not arranged for matrix products. A task is a chunk of keys of one key/value head, for the
   queries of all heads that share it (the rows). It makes a softmax and a sum of its own for each row, and `join_chunks`
   joins them in order: the bits do not depend on the number of threads. */

#define FEW_QUERIES 4
#define FEW_ROWS 32
#define CHUNK 512  /* keys, a multiple of LANES */
#define AHEAD 4096 /* floats: how far ahead of its use memory is fetched */

/* Vector gains, distant rotations and dropout are left to tiles. */
static int has_few_queries(const Call *call) {
  return call->queries <= FEW_QUERIES && call->queries * (call->heads / call->kv_heads) <= FEW_ROWS &&
         !(call->gain && call->vector_gain) && !call->distant.data && call->dropout == 0;
}

/* The memory of one thread */
typedef struct {
  float *q, *raw_q;        /* one row each */
  float *k, *v, *raw_k;    /* of a chunk, NULL if they are read in place; the padding is 0 */
  float *logits, *numbers; /* [CHUNK] */
} Few;

/* The result of a chunk for one row, followed by the sum of weighted values, [VALUE_WIDTH] */
typedef struct {
  float largest, sum; /* of the logits, and of exp(logit − largest) */
} ChunkSum;

/* A chunk of keys for one query. Where positions are consecutive, keys before `first` take the first column of the
   tables, keys from `end` on the last, and key j between them column + j. */
typedef struct {
  Int b, h, i;         /* sequence, query head, query */
  Int first_key, keys; /* of the chunk */
  const Int *k_pos;
  Int q_pos;
  Span span; /* of the keys */
  Int first, end, column;
} Run;

/* Whether rows are floats in whole vectors, one after the other */
static int in_place(const View *x, Int bf16, Int d) { return !bf16 && x->stride[3] == 1 && d % LANES == 0; }

static void allocate_few(const Call *call, Arena *arena, Few *work) {
  memset(work, 0, sizeof *work);
  work->q = allocate(arena, HEAD_WIDTH(call));
  work->raw_q = call->raw_q.data ? allocate(arena, QUERY_WIDTH(call)) : work->q;
  if (!in_place(&call->k, call->bf16, call->head_dim)) work->k = allocate(arena, CHUNK * HEAD_WIDTH(call));
  if (!in_place(&call->v, call->bf16, call->value_dim)) work->v = allocate(arena, CHUNK * VALUE_WIDTH(call));
  if (call->raw_k.data && !in_place(&call->raw_k, call->raw_k_bf16, call->key_dim))
    work->raw_k = allocate(arena, CHUNK * KEY_WIDTH(call));
  work->logits = allocate(arena, CHUNK), work->numbers = allocate(arena, CHUNK);
}

/* Rows of a head, copied into `memory` unless it is NULL. Sets *stride, from row to row. */
static const float *rows_of(const View *x, Int bf16, Int b, Int h, Int from, Int n, Int d, Int width, float *memory,
                            Int *stride) {
  *stride = memory ? width : x->stride[2];
  if (!memory) return (const float *)x->data + b * x->stride[0] + h * x->stride[1] + from * x->stride[2];
  read_rows(x, bf16, b, h, from, n, d, width, memory);
  return memory;
}

/* out[u] = x · row_u for LANES rows. Sums over lanes: in each step the lanes of two vectors alternate, and their halves
   are added. */
INLINE void dots_of_rows(Int width, const float *x, const float *rows, Int stride, float *out) {
  vec a[LANES];
#pragma GCC unroll 16
  for (int u = 0; u < LANES; u++) { /* row by row: memory is read in its order */
    const float *row = rows + u * stride;
    vec sum = {0};
    for (Int k = 0; k < width; k += LANES) {
      __builtin_prefetch(row + k + AHEAD);
      sum += load(x + k) * load(row + k);
    }
    a[u] = sum;
  }
#pragma GCC unroll 4
  for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int u = 0; u < half; u++) a[u] = ALTERNATE_LOW(a[u], a[u + half]) + ALTERNATE_HIGH(a[u], a[u + half]);
  store(out, a[0]);
}

/* out[j] = x · row_j */
static void dots(Int n, Int width, const float *x, const float *rows, Int stride, float *out) {
  Int j = 0;
  for (; j + LANES <= n; j += LANES) dots_of_rows(width, x, rows + j * stride, stride, out + j);
  for (; j < n; j++) out[j] = dot(width, x, rows + j * stride);
}

/* out += Σ_j weight_j · row_j, for `vectors` vectors of each row */
INLINE void add_rows(const int vectors, Int n, const float *weights, const float *rows, Int stride, float *out) {
  vec acc[8];
#pragma GCC unroll 8
  for (int u = 0; u < vectors; u++) acc[u] = load(out + u * LANES);
  for (Int j = 0; j < n; j++, rows += stride) {
    const vec w = broadcast(weights[j]);
#pragma GCC unroll 8
    for (int u = 0; u < vectors; u++) {
      __builtin_prefetch(rows + u * LANES + AHEAD);
      acc[u] += w * load(rows + u * LANES);
    }
  }
#pragma GCC unroll 8
  for (int u = 0; u < vectors; u++) store(out + u * LANES, acc[u]);
}

static void weighted_sum(Int n, Int width, const float *weights, const float *rows, Int stride, float *out) {
  Int p = 0;
  for (; p + 8 * LANES <= width; p += 8 * LANES) add_rows(8, n, weights, rows + p, stride, out + p);
  for (; p + 4 * LANES <= width; p += 4 * LANES) add_rows(4, n, weights, rows + p, stride, out + p);
  for (; p < width; p += LANES) add_rows(1, n, weights, rows + p, stride, out + p);
}

/* Of vectors of any length */
INLINE float short_dot(Int n, const float *x, const float *y) {
  const Int whole = n / LANES * LANES;
  float sum = dot(whole, x, y);
  for (Int k = whole; k < n; k++) sum += x[k] * y[k];
  return sum;
}

static Run make_run(const Call *call, Int b, Int h, Int i, Int first_key, Int keys, Span span) {
  Run run = {.b = b, .h = h, .i = i, .first_key = first_key, .keys = keys, .span = span};
  run.q_pos = call->q_pos[b * call->q_pos_stride + i];
  run.k_pos = call->k_pos + b * call->k_pos_stride + first_key;
  run.column = span.first - run.q_pos - call->first_offset;
  run.first = max_of(0, min_of(keys, -run.column));
  run.end = max_of(run.first, min_of(keys, call->columns - run.column));
  return run;
}

INLINE Int column_in_run(const Call *call, const Run *run, Int j) {
  return max_of(0, min_of(run->k_pos[j] - run->q_pos - call->first_offset, call->columns - 1));
}

/* numbers[j] = the number of a table for key j */
static void find_numbers(const Call *call, const Run *run, const float *table, float *numbers) {
  if (!run->span.consecutive) {
    for (Int j = 0; j < run->keys; j++) numbers[j] = table[column_in_run(call, run, j)];
    return;
  }
  for (Int j = 0; j < run->first; j++) numbers[j] = table[0];
  for (Int j = run->first; j < run->end; j++) numbers[j] = table[run->column + j];
  for (Int j = run->end; j < run->keys; j++) numbers[j] = table[call->columns - 1];
}

/* numbers[j] = x · (the vector of a table for key j) */
static void find_products(const Call *call, const Run *run, Int size, const float *x, const float *table,
                          float *numbers) {
  if (!run->span.consecutive || size % LANES) {
    Int last = -1;
    for (Int j = 0; j < run->keys; j++) { /* neighbours at one column share the product */
      const Int column = column_in_run(call, run, j);
      numbers[j] = column == last ? numbers[j - 1] : short_dot(size, x, table + column * size);
      last = column;
    }
    return;
  }
  const float before = dot(size, x, table), after = dot(size, x, table + (call->columns - 1) * size);
  for (Int j = 0; j < run->first; j++) numbers[j] = before;
  if (run->end > run->first)
    dots(run->end - run->first, size, x, table + (run->column + run->first) * size, size, numbers + run->first);
  for (Int j = run->end; j < run->keys; j++) numbers[j] = after;
}

/* logits[j] += level_r · (e_i + d_j). Levels are large and nearly cancel: they are added in double precision. */
static void add_levels(const Call *call, const Run *run, float *numbers, float *logits) {
  const Int h = run->h;
  const View *e = &call->query_level, *d = &call->key_level;
  double of_query = 0;
  if (e->data) of_query = ((const double *)e->data)[run->b * e->stride[0] + h * e->stride[1] + run->i * e->stride[2]];
  for (Int j = 0; j < run->keys && !call->level; j++) numbers[j] = 1;
  if (call->level) find_numbers(call, run, OF_HEAD(level, 1), numbers);
  if (!d->data) {
    for (Int j = 0; j < run->keys; j++) logits[j] += numbers[j] * (float)of_query;
    return;
  }
  const double *of_keys = (const double *)d->data + run->b * d->stride[0] + h * d->stride[1];
  for (Int j = 0; j < run->keys; j++)
    logits[j] += numbers[j] * (float)(of_query + of_keys[(run->first_key + j) * d->stride[2]]);
}

/* −∞ for keys that the query may not attend to */
static void hide(const Call *call, const Run *run, float *logits) {
  if (run->span.min - run->q_pos < call->lowest || run->span.max - run->q_pos > call->highest)
    for (Int j = 0; j < run->keys; j++) {
      const Int r = run->k_pos[j] - run->q_pos;
      if (r < call->lowest || r > call->highest) logits[j] = -INFINITY;
    }
  const View *x = &call->mask;
  if (!x->data) return;
  const uint8_t *bytes = (const uint8_t *)x->data + run->b * x->stride[0] + run->h * x->stride[1] +
                         run->i * x->stride[2] + run->first_key * x->stride[3];
  for (Int j = 0; j < run->keys; j++)
    if (!bytes[j * x->stride[3]]) logits[j] = -INFINITY;
}

/* From content products to logits, −∞ from the last key to the end of its vector. raw_k: rows of the chunk. */
static void finish_logits(const Call *call, const Run *run, const float *raw_q, const float *raw_k, Int raw_k_stride,
                          float *numbers, float *logits) {
  const Int n = run->keys, h = run->h;
  if (call->gain) {
    find_numbers(call, run, OF_HEAD(gain, 1), numbers);
    for (Int j = 0; j < n; j++) logits[j] *= numbers[j];
  }
  if (call->query) {
    find_products(call, run, call->query_dim, raw_q, OF_HEAD(query, call->query_dim), numbers);
    for (Int j = 0; j < n; j++) logits[j] += numbers[j];
  }
  if (call->key) {
    const float *table = OF_HEAD(key, call->key_dim);
    for (Int j = 0; j < n; j++)
      logits[j] +=
          short_dot(call->key_dim, raw_k + j * raw_k_stride, table + column_in_run(call, run, j) * call->key_dim);
  }
  const float scale = (float)call->scale;
  for (Int j = 0; j < n; j++) logits[j] *= scale;
  if (call->bias) {
    find_numbers(call, run, OF_HEAD(bias, 1), numbers);
    for (Int j = 0; j < n; j++) logits[j] += numbers[j];
  }
  if (HAS_LEVELS(call)) add_levels(call, run, numbers, logits);
  if (call->temperature.data) {
    float factor;
    read_numbers(&call->temperature, run->b, h, run->i, 1, &factor, NULL);
    for (Int j = 0; j < n; j++) logits[j] *= factor;
  }
  if (call->softcap > 0) {
    const float cap = (float)call->softcap, inverse = (float)(1 / call->softcap);
    for (Int j = 0; j < n; j += LANES) store(logits + j, cap * tanh_lanes(load(logits + j) * inverse));
  }
  hide(call, run, logits);
  for (Int j = n; j < round_up(n, LANES); j++) logits[j] = -INFINITY;
}

/* Logits become exp(logit − largest). NaN is lost in the largest, and stays in the sum. */
static ChunkSum exponentials(Int n, float *logits) {
  vec top = broadcast(-INFINITY), total = {0};
  for (Int j = 0; j < n; j += LANES) top = larger(load(logits + j), top);
  ChunkSum part = {.largest = max_lanes(top)};
  if (part.largest == -INFINITY) { /* all hidden, or NaN */
    for (Int j = 0; j < n; j++)
      if (logits[j] != logits[j]) part.sum = NAN;
    return part;
  }
  for (Int j = 0; j < n; j += LANES) {
    const vec x = exp_lanes(load(logits + j) - part.largest);
    total += x;
    store(logits + j, x);
  }
  part.sum = sum_lanes(total);
  return part;
}

/* out += Σ_j weight_j · value_r */
static void add_values_of_run(const Call *call, const Run *run, const float *weights, float *out) {
  const Int h = run->h, size = call->value_dim;
  const float *table = OF_HEAD(value, size);
  for (Int j = 0; j < run->keys; j++) {
    const float *value = table + column_in_run(call, run, j) * size, weight = weights[j];
    for (Int x = 0; x < size; x++) out[x] += weight * value[x];
  }
}

#define PART_FLOATS(call) (2 + VALUE_WIDTH(call))

/* A chunk of keys for all rows of a key/value head. `found` gets a `ChunkSum` and a sum for each row; zero on entry. */
static void few_chunk(const Call *call, Int b, Int kv, Int first_key, Few *work, float *found) {
  const Int group = call->heads / call->kv_heads, n = min_of(CHUNK, call->keys - first_key);
  const Span span = find_span(call->k_pos + b * call->k_pos_stride + first_key, n);
  Int k_stride, v_stride, raw_k_stride;
  const float *k =
      rows_of(&call->k, call->bf16, b, kv, first_key, n, call->head_dim, HEAD_WIDTH(call), work->k, &k_stride);
  const float *v =
      rows_of(&call->v, call->bf16, b, kv, first_key, n, call->value_dim, VALUE_WIDTH(call), work->v, &v_stride);
  const float *raw_k = k;
  raw_k_stride = k_stride;
  if (call->raw_k.data)
    raw_k = rows_of(&call->raw_k, call->raw_k_bf16, b, kv, first_key, n, call->key_dim, KEY_WIDTH(call), work->raw_k,
                    &raw_k_stride);
  for (Int row = 0; row < group * call->queries; row++, found += PART_FLOATS(call)) {
    const Int h = kv * group + row / call->queries, i = row % call->queries;
    const Run run = make_run(call, b, h, i, first_key, n, span);
    ChunkSum part = {.largest = -INFINITY};
    if (span.min - run.q_pos <= call->highest && span.max - run.q_pos >= call->lowest) {
      read_rows(&call->q, call->bf16, b, h, i, 1, call->head_dim, HEAD_WIDTH(call), work->q);
      if (call->raw_q.data)
        read_rows(&call->raw_q, call->raw_q_bf16, b, h, i, 1, call->query_dim, QUERY_WIDTH(call), work->raw_q);
      dots(n, round_up(call->head_dim, LANES), work->q, k, k_stride, work->logits);
      finish_logits(call, &run, work->raw_q, raw_k, raw_k_stride, work->numbers, work->logits);
      part = exponentials(n, work->logits);
    }
    memcpy(found, &part, sizeof part);
    if (part.largest == -INFINITY) continue;
    weighted_sum(n, round_up(call->value_dim, LANES), work->logits, v, v_stride, found + 2);
    if (call->value) add_values_of_run(call, &run, work->logits, found + 2);
  }
}

/* The output of one row from its chunks. `found` is that of the first; the others are `apart` floats apart. */
static void join_chunks(const Call *call, Int b, Int h, Int i, Int chunks, float *found, Int apart) {
  const float sink = call->sinks ? call->sinks[h] : -INFINITY;
  float largest = sink, sum = 0, *out = found + 2;
  for (Int c = 0; c < chunks; c++) largest = fmaxf(largest, found[c * apart]);
  if (sink != -INFINITY) sum = expf(sink - largest);
  for (Int c = 0; c < chunks; c++) {
    ChunkSum part;
    memcpy(&part, found + c * apart, sizeof part);
    const float factor =
        part.largest == -INFINITY ? 1 : expf(part.largest - largest); /* nothing visible: zeros, or NaN */
    sum += factor * part.sum;
    const float *values = found + c * apart + 2;
    for (Int x = 0; x < call->value_dim; x++) out[x] = factor * values[x] + (c ? out[x] : 0);
  }
  finish_query(call, b, h, i, largest, sum, out);
}

/* 0, or 1 if there is not enough memory */
static int forward_few(const Call *call) {
  const Int group = call->heads / call->kv_heads, rows = group * call->queries, heads = call->batch * call->kv_heads;
  const Int chunks = (call->keys + CHUNK - 1) / CHUNK, tasks = heads * chunks, apart = rows * PART_FLOATS(call);
  const Int threads = thread_count(call, tasks);
  Arena size = {0};
  Few one;
  allocate_few(call, &size, &one);
  float *memory = allocate_zeros(size.used * threads), *found = allocate_zeros(tasks * apart);
  if (!memory || !found) {
    free(memory);
    free(found);
    return 1;
  }
#pragma omp parallel num_threads(threads)
  {
    const Int thread = thread_number(), team = team_size();
    Arena arena = {memory + thread * size.used, 0};
    Few work;
    allocate_few(call, &arena, &work);
    for (Int task = tasks * thread / team; task < tasks * (thread + 1) / team; task++) {
      const Int head = task / chunks, b = head / call->kv_heads, kv = head % call->kv_heads;
      few_chunk(call, b, kv, task % chunks * CHUNK, &work, found + task * apart);
    }
  }
  for (Int head = 0; head < heads; head++)
    for (Int row = 0; row < rows; row++)
      join_chunks(call, head / call->kv_heads, head % call->kv_heads * group + row / call->queries, row % call->queries,
                  chunks, found + head * chunks * apart + row * PART_FLOATS(call), apart);
  free(memory);
  free(found);
  return 0;
}

/* 0, or 1 if there is not enough memory. A task is the queries of one tile of one head. */
int locant_forward(const Call *call) {
  if (has_few_queries(call)) return forward_few(call);
  const Int blocks = (call->queries + TILE - 1) / TILE, tasks = call->batch * call->heads * blocks;
  const Int threads = thread_count(call, tasks), group = call->heads / call->kv_heads;
  float *table_memory = NULL, *memory = NULL;
  Tables *tables = make_tables(call, 0, &table_memory);
  Arena size = {0};
  Forward one;
  allocate_forward(call, &size, &one);
  if (tables) memory = allocate_zeros(size.used * threads);
  if (!memory) {
    if (tables) free(table_memory);
    free(tables);
    return 1;
  }
#pragma omp parallel num_threads(threads)
  {
    const Int thread = thread_number(), team = team_size();
    Arena arena = {memory + thread * size.used, 0};
    Forward work;
    allocate_forward(call, &arena, &work);
    Int last = -1; /* the head of the task before, counted over the batch */
    for (Int task = tasks * thread / team; task < tasks * (thread + 1) / team; task++) {
      const Int head = task / blocks, b = head / call->heads, h = head % call->heads, kv = h / group;
      if (head != last) {
        const int same_keys = last >= 0 && last / call->heads == b && last % call->heads / group == kv;
        if (!same_keys) read_keys(call, b, kv, &work);
        if (call->key) far_terms(call, call->keys, KEY_WIDTH(call), work.raw_k, tables[h].key_rows, work.far_key_term);
        if (call->key_level.data)
          read_numbers(&call->key_level, b, h, 0, call->keys, work.key_level[0], work.key_level[1]);
        last = head;
      }
      forward_queries(call, b, h, task % blocks * TILE, &work, tables + h);
    }
  }
  free(memory);
  free(table_memory);
  free(tables);
  return 0;
}

/* ---------------------------------------------------------------- backward */

/* Over PADDED_COLUMNS columns, vectors in rows; NULL if not wanted */
typedef struct {
  float *bias, *gain, *query, *key, *value, *level;
} TableGradients;

static void allocate_table_gradients(const Call *call, Arena *arena, TableGradients *grads) {
  const Int columns = PADDED_COLUMNS(call), width = HEAD_WIDTH(call);
  memset(grads, 0, sizeof *grads);
  if (call->dbias) grads->bias = allocate(arena, columns);
  if (call->dgain) grads->gain = allocate(arena, columns * (call->vector_gain ? width : 1));
  if (call->dquery) grads->query = allocate(arena, columns * QUERY_WIDTH(call));
  if (call->dkey) grads->key = allocate(arena, columns * KEY_WIDTH(call));
  if (call->dvalue) grads->value = allocate(arena, columns * VALUE_WIDTH(call));
  if (call->dlevel) grads->level = allocate(arena, columns);
}

/* For SCATTER: a row of a tile summed by column. `columns` lists those with a sum; all other sums are zero. Gradients of
   tables are then short sums of short sums, which keeps their rounding small. */
typedef struct {
  float *sum;      /* [PADDED_COLUMNS] */
  int32_t *listed; /* [PADDED_COLUMNS], 1 if the column is in `columns` */
  Int *columns, count;
} ColumnSums;

INLINE void add_to_column(ColumnSums *sums, Int column, float x) {
  if (x == 0) return;
  if (!sums->listed[column]) sums->listed[column] = 1, sums->columns[sums->count++] = column;
  sums->sum[column] += x;
}

INLINE void clear_columns(ColumnSums *sums) {
  for (Int n = 0; n < sums->count; n++) sums->sum[sums->columns[n]] = 0, sums->listed[sums->columns[n]] = 0;
  sums->count = 0;
}

/* The memory of one thread */
typedef struct {
  float *k, *raw_k, *k_panels, *v_panels, *dk, *draw_k, *dv, *far_key_term[2];                 /* of a k/v head */
  float *q, *raw_q, *grad, *dq, *draw_q, *delta, *lse, *far_query_term[2], *far_value_term[2]; /* of a head */
  float *logits, *content, *weights, *dlogits, *transposed, *scaled_q, *rows;                  /* of a tile */
  float *query_level[2], *key_level[2], *temperature;                                          /* of a head */
  float *distant, *ddistant, *distant_panels;                                                  /* of a k/v head */
  float *left, *right, *dleft, *dright;                                                        /* of a head */
  double *dquery_level, *dkey_level, *dtemperature;                                            /* of a head */
  float *untempered, *slope;                                                                   /* of a tile */
  float *column_sum;                                                                           /* one row of a table */
  float *norms, *longest;    /* of the queries of a head, and of keys by tile; NULL without a bound */
  TableGradients head_grads; /* of one head; then added to those of the thread */
  ColumnSums sums;
  Span *q_spans, *k_spans;
} Backward;

static void allocate_backward(const Call *call, Arena *arena, Backward *work) {
  const Int width = HEAD_WIDTH(call), value_width = VALUE_WIDTH(call);
  const Int query_width = QUERY_WIDTH(call), key_width = KEY_WIDTH(call);
  const Int widest = max_of(max_of(width, value_width), max_of(query_width, key_width));
  const Int keys = PADDED_KEYS(call), queries = PADDED_QUERIES(call) + BLOCK_ROWS;
  memset(work, 0, sizeof *work);
  work->k = allocate(arena, keys * width), work->dk = allocate(arena, keys * width);
  work->raw_k = call->raw_k.data ? allocate(arena, keys * key_width) : work->k;
  work->draw_k = call->raw_k.data ? allocate(arena, keys * key_width) : work->dk;
  work->k_panels = allocate(arena, keys * call->head_dim);
  work->v_panels = allocate(arena, keys * call->value_dim);
  work->dv = allocate(arena, keys * value_width);
  work->q = allocate(arena, queries * width), work->dq = allocate(arena, queries * width);
  work->raw_q = call->raw_q.data ? allocate(arena, queries * query_width) : work->q;
  work->draw_q = call->raw_q.data ? allocate(arena, queries * query_width) : work->dq;
  work->grad = allocate(arena, queries * value_width);
  work->delta = allocate(arena, queries), work->lse = allocate(arena, 2 * queries);
  for (int end = 0; end < 2; end++) {
    work->far_key_term[end] = allocate(arena, keys);
    work->far_query_term[end] = allocate(arena, queries);
    work->far_value_term[end] = allocate(arena, queries);
  }
  work->logits = allocate(arena, TILE_FLOATS), work->content = allocate(arena, TILE_FLOATS);
  work->transposed = allocate(arena, TILE_FLOATS);
  work->weights = allocate(arena, TILE_FLOATS), work->dlogits = allocate(arena, TILE_FLOATS);
  if (call->distant.data) {
    work->distant = allocate(arena, keys * width), work->ddistant = allocate(arena, keys * width);
    work->distant_panels = allocate(arena, keys * call->head_dim);
    work->left = allocate(arena, queries * width), work->dleft = allocate(arena, queries * width);
    work->right = allocate(arena, queries * width), work->dright = allocate(arena, queries * width);
  }
  for (int part = 0; part < 2 && HAS_LEVELS(call); part++)
    work->query_level[part] = allocate(arena, queries), work->key_level[part] = allocate(arena, keys);
  if (HAS_LEVELS(call)) {
    work->dquery_level = (double *)allocate(arena, 2 * queries);
    work->dkey_level = (double *)allocate(arena, 2 * keys);
  }
  if (call->temperature.data) {
    work->temperature = allocate(arena, queries), work->dtemperature = (double *)allocate(arena, 2 * queries);
    work->untempered = allocate(arena, TILE_FLOATS);
  }
  if (call->softcap > 0) work->slope = allocate(arena, TILE_FLOATS);
  work->scaled_q = allocate(arena, (TILE + BLOCK_ROWS) * width);
  work->rows = allocate(arena, TILE * max_of(width, value_width));
  work->column_sum = allocate(arena, widest);
  if (has_bound(call)) work->norms = allocate(arena, queries), work->longest = allocate(arena, keys / TILE);
  allocate_table_gradients(call, arena, &work->head_grads);
  work->sums.sum = allocate(arena, PADDED_COLUMNS(call));
  work->sums.listed = (int32_t *)allocate(arena, PADDED_COLUMNS(call));
  work->sums.columns = (Int *)allocate(arena, 2 * TILE);
  work->q_spans = (Span *)allocate(arena, (Int)(sizeof(Span) / 4) * (PADDED_QUERIES(call) / TILE));
  work->k_spans = (Span *)allocate(arena, (Int)(sizeof(Span) / 4) * (PADDED_KEYS(call) / TILE));
}

/* The gradient of every weight, grad_i · (v_j + value_r); in a FAR tile without the value term, which is one number for
   a whole row */
static void weight_gradients(const Call *call, const Tile *tile, Backward *work, const Tables *tables,
                             float *dweights) {
  const Int n = tile->queries, m = tile->keys, dv = call->value_dim, width = VALUE_WIDTH(call);
  const float *grad = work->grad + tile->first_query * width;
  product(n, round_up(m, PANEL) / PANEL, dv, grad, width, 1, work->v_panels + tile->first_key * dv, PANEL, dv * PANEL,
          dweights, TILE_STRIDE, 0);
  if (!tables->value_rows) return;
  if (tile->kind == BAND) add_band_products(n, m, dv, grad, width, tables->value_panels, tile->column, dweights);
  if (tile->kind == SCATTER)
    for (Int i = 0; i < n; i++)
      for (Int j = 0; j < m; j++)
        dweights[i * TILE_STRIDE + j] +=
            dot(width, grad + i * width, tables->value_rows + column_of(call, tile, i, j) * width);
}

/* exp(logit − largest − log_sum). It is at most 1; the forward pass of few queries rounds large logits in another way. */
INLINE vec weight_of(vec logit, float largest, float log_sum) {
  const vec x = logit - largest - log_sum;
  return exp_lanes(choose(x > 0.0f, (vec){0}, x));
}

/* Into work->dlogits the gradient of every logit, into work->weights the weights after dropout: zero around the tile */
static void logit_gradients(const Call *call, const Tile *tile, Backward *work, const Tables *tables,
                            const float *logits) {
  const Int n = tile->queries, m = tile->keys;
  float *weights = INTERIOR(work->weights), *dlogits = INTERIOR(work->dlogits);
  float *dweights = INTERIOR(work->transposed); /* free once the logits are there */
  weight_gradients(call, tile, work, tables, dweights);
  for (Int i = 0; i < n; i++) {
    const Int query = tile->first_query + i;
    const float largest = work->lse[2 * query], log_sum = work->lse[2 * query + 1], delta = work->delta[query];
    const float far = tables->value_rows && tile->kind == FAR ? work->far_value_term[tile->far_end][query] : 0;
    const float *logit = logits + i * TILE_STRIDE, *dweight = dweights + i * TILE_STRIDE;
    float *weight = weights + i * TILE_STRIDE, *dlogit = dlogits + i * TILE_STRIDE;
    if (call->dropout > 0) {
      const Dropout dropout = row_dropout(call, tile, i);
      for (Int j = 0; j < m; j += LANES) {
        const vec x = weight_of(load(logit + j), largest, log_sum);
        const vec factor = dropout_factors(dropout, tile->first_key + j);
        store(weight + j, x * factor);
        store(dlogit + j, x * ((load(dweight + j) + far) * factor - delta));
      }
    } else
      for (Int j = 0; j < m; j += LANES) {
        const vec x = weight_of(load(logit + j), largest, log_sum);
        store(weight + j, x);
        store(dlogit + j, x * (load(dweight + j) + far - delta));
      }
    clear_after(weight, m);
    clear_after(dlogit, m);
  }
  for (Int i = n; i < min_of(n + BLOCK_ROWS, TILE); i++) { /* shifted products read these rows too */
    memset(weights + i * TILE_STRIDE, 0, 4 * TILE);
    memset(dlogits + i * TILE_STRIDE, 0, 4 * TILE);
  }
}

/* Multiplies the gradients of capped logits by the derivative of the cap. Hidden pairs have a gradient of 0, whatever the
   derivative is. */
static void uncap_gradients(const Tile *tile, const float *logits, const float *slope, float *dlogits) {
  for (Int i = 0; i < tile->queries; i++)
    for (Int j = 0; j < tile->keys; j += LANES) {
      const Int here = i * TILE_STRIDE + j;
      const vec given = load(dlogits + here);
      store(dlogits + here, choose(load(logits + here) == -INFINITY, given, given * load(slope + here)));
    }
}

/* The gradients of the temperatures; then multiplies `dlogits` by them. Hidden pairs have a gradient of 0, whatever the
   logit is. */
static void temperature_gradients(const Tile *tile, Backward *work) {
  const float *untempered = INTERIOR(work->untempered);
  float *dlogits = INTERIOR(work->dlogits);
  for (Int i = 0; i < tile->queries; i++) {
    const float temperature = work->temperature[tile->first_query + i];
    vec sum = {0};
    for (Int j = 0; j < tile->keys; j += LANES) {
      float *at = dlogits + i * TILE_STRIDE + j;
      const vec x = load(at);
      sum += choose(x == 0, x, x * load(untempered + i * TILE_STRIDE + j));
      store(at, x * temperature);
    }
    work->dtemperature[tile->first_query + i] += sum_lanes(sum);
  }
}

/* SCATTER: table[column of the pair] += W · x_i, by rows of W; by columns, with x_j, if the strides are exchanged */
static void scatter_collect(const Call *call, const Tile *tile, Backward *work, const float *w, Int row, Int column,
                            Int n, Int m, Int width, const float *x, float *table) {
  ColumnSums *sums = &work->sums;
  for (Int i = 0; i < n; i++) {
    for (Int j = 0; j < m; j++) {
      const Int e = row == TILE_STRIDE ? column_of(call, tile, i, j) : column_of(call, tile, j, i);
      add_to_column(sums, e, w[i * row + j * column]);
    }
    for (Int y = 0; y < sums->count; y++) {
      const Int e = sums->columns[y];
      add_scaled(width, sums->sum[e], x + i * width, table + e * width);
    }
    clear_columns(sums);
  }
}

/* The gradients of v and of the value table */
static void value_gradients(const Call *call, const Tile *tile, Backward *work, TableGradients *grads) {
  const Int n = tile->queries, m = tile->keys, width = VALUE_WIDTH(call);
  const float *weights = INTERIOR(work->weights), *grad = work->grad + tile->first_query * width;
  product(m, width / PANEL, n, weights, 1, TILE_STRIDE, grad, width, PANEL, work->dv + tile->first_key * width, width,
          1);
  if (!grads->value) return;
  if (tile->kind == BAND)
    collect_band(n, m, width, weights, TILE_STRIDE, 1, grad, tile->column, 1, grads->value);
  else if (tile->kind == SCATTER)
    scatter_collect(call, tile, work, weights, TILE_STRIDE, 1, n, m, width, grad, grads->value);
  else {
    memset(work->column_sum, 0, (size_t)(4 * width));
    for (Int i = 0; i < n; i++)
      add_scaled(width, sum_row(weights + i * TILE_STRIDE, m), grad + i * width, work->column_sum);
    add_scaled(width, 1, work->column_sum, grads->value + tile->column * width);
  }
}

/* table[column of the pair] += x_ij over a whole tile: the gradient of a bias or a scalar gain */
static void collect_scalars(const Call *call, const Tile *tile, Backward *work, const float *x, float *table) {
  const Int n = tile->queries, m = tile->keys;
  if (tile->kind == BAND)
    for (Int i = 0; i < n; i++) {
      float *to = table + tile->column - i;
      for (Int j = 0; j < m; j += LANES) store(to + j, load(to + j) + load(x + i * TILE_STRIDE + j));
    }
  else if (tile->kind == FAR) {
    vec sum = {0};
    for (Int i = 0; i < n; i++)
      for (Int j = 0; j < m; j += LANES) sum += load(x + i * TILE_STRIDE + j);
    table[tile->column] += sum_lanes(sum);
  } else {
    ColumnSums *sums = &work->sums;
    for (Int i = 0; i < n; i++) {
      for (Int j = 0; j < m; j++) add_to_column(sums, column_of(call, tile, i, j), x[i * TILE_STRIDE + j]);
      for (Int y = 0; y < sums->count; y++) table[sums->columns[y]] += sums->sum[sums->columns[y]];
      clear_columns(sums);
    }
  }
}

/* The gradients of level_r · (e_i + d_j): of the levels and of the table */
static void level_gradients(const Call *call, const Tile *tile, Backward *work, const Operands *in,
                            TableGradients *grads) {
  const Int n = tile->queries, m = tile->keys;
  const float *dlogits = INTERIOR(work->dlogits), *level = in->tables->level;
  float *of_table = INTERIOR(work->transposed);
  vec by_key[TILE / LANES] = {{0}};
  for (Int i = 0; i < n; i++) {
    vec by_query = {0};
    for (Int j = 0; j < m; j += LANES) {
      vec x = load(dlogits + i * TILE_STRIDE + j);
      if (grads->level) store(of_table + i * TILE_STRIDE + j, choose(x == 0, x, x * levels_at(in, i, j)));
      if (level) x *= numbers_at(call, tile, level, i, j);
      by_query += x, by_key[j / LANES] += x;
    }
    work->dquery_level[tile->first_query + i] += sum_lanes(by_query);
  }
  for (Int j = 0; j < m; j++) work->dkey_level[tile->first_key + j] += by_key[j / LANES][j % LANES];
  if (grads->level) collect_scalars(call, tile, work, of_table, grads->level);
}

/* The gradients of p_i·query_r + t_j·key_r, for each kind of tile: of raw_q, raw_k and of the two tables. `dlogits` is
   already multiplied by the scale. */

static void far_vector_gradients(const Call *call, const Tile *tile, Backward *work, const Tables *tables,
                                 TableGradients *grads) {
  const Int n = tile->queries, m = tile->keys, column = tile->column;
  const float *dlogits = INTERIOR(work->dlogits);
  const Int qw = QUERY_WIDTH(call), kw = KEY_WIDTH(call);
  const float *q = work->raw_q + tile->first_query * qw, *k = work->raw_k + tile->first_key * kw;
  float *dq = work->draw_q + tile->first_query * qw, *dk = work->draw_k + tile->first_key * kw;
  vec by_key[TILE / LANES] = {{0}};
  memset(work->column_sum, 0, (size_t)(4 * qw));
  for (Int i = 0; i < n; i++) {
    vec sum = {0};
    for (Int j = 0; j < TILE; j += LANES) {
      const vec x = load(dlogits + i * TILE_STRIDE + j);
      sum += x, by_key[j / LANES] += x;
    }
    const float x = sum_lanes(sum);
    if (tables->query_rows) add_scaled(qw, x, tables->query_rows + column * qw, dq + i * qw);
    if (grads->query) add_scaled(qw, x, q + i * qw, work->column_sum);
  }
  if (grads->query) add_scaled(qw, 1, work->column_sum, grads->query + column * qw);
  memset(work->column_sum, 0, (size_t)(4 * kw));
  for (Int j = 0; j < m; j++) {
    const float x = by_key[j / LANES][j % LANES];
    if (tables->key_rows) add_scaled(kw, x, tables->key_rows + column * kw, dk + j * kw);
    if (grads->key) add_scaled(kw, x, k + j * kw, work->column_sum);
  }
  if (grads->key) add_scaled(kw, 1, work->column_sum, grads->key + column * kw);
}

static void band_vector_gradients(const Call *call, const Tile *tile, Backward *work, const Tables *tables,
                                  TableGradients *grads) {
  const Int n = tile->queries, m = tile->keys, base = tile->column;
  const float *dlogits = INTERIOR(work->dlogits);
  const Int qw = QUERY_WIDTH(call), kw = KEY_WIDTH(call);
  const float *q = work->raw_q + tile->first_query * qw, *k = work->raw_k + tile->first_key * kw;
  float *dq = work->draw_q + tile->first_query * qw, *dk = work->draw_k + tile->first_key * kw;
  if (tables->query_rows) add_band_sums(n, m, qw, dlogits, TILE_STRIDE, 1, tables->query_rows, base, 1, dq);
  if (grads->query) collect_band(n, m, qw, dlogits, TILE_STRIDE, 1, q, base, 1, grads->query);
  if (tables->key_rows) add_band_sums(m, n, kw, dlogits, 1, TILE_STRIDE, tables->key_rows, base, -1, dk);
  if (grads->key) collect_band(m, n, kw, dlogits, 1, TILE_STRIDE, k, base, -1, grads->key);
}

static void scatter_vector_gradients(const Call *call, const Tile *tile, Backward *work, const Tables *tables,
                                     TableGradients *grads) {
  const Int n = tile->queries, m = tile->keys;
  const float *dlogits = INTERIOR(work->dlogits);
  const Int qw = QUERY_WIDTH(call), kw = KEY_WIDTH(call);
  const float *q = work->raw_q + tile->first_query * qw, *k = work->raw_k + tile->first_key * kw;
  float *dq = work->draw_q + tile->first_query * qw, *dk = work->draw_k + tile->first_key * kw;
  for (Int i = 0; i < n; i++)
    for (Int j = 0; j < m; j++) {
      const float x = dlogits[i * TILE_STRIDE + j];
      const Int column = column_of(call, tile, i, j);
      if (tables->query_rows) add_scaled(qw, x, tables->query_rows + column * qw, dq + i * qw);
      if (tables->key_rows) add_scaled(kw, x, tables->key_rows + column * kw, dk + j * kw);
    }
  if (grads->query) scatter_collect(call, tile, work, dlogits, TILE_STRIDE, 1, n, m, qw, q, grads->query);
  if (grads->key) scatter_collect(call, tile, work, dlogits, 1, TILE_STRIDE, m, n, kw, k, grads->key);
}

/* The gradients of the content product under a vector gain: of q, k and the gain. In a FAR tile one column serves all
   pairs: as without a gain, with q times that column. */
static void far_gain_gradients(const Call *call, const Tile *tile, Backward *work, const Tables *tables,
                               TableGradients *grads) {
  const Int n = tile->queries, m = tile->keys, width = HEAD_WIDTH(call);
  const float *dlogits = INTERIOR(work->dlogits), *gain = tables->gain_rows + tile->column * width;
  const float *q = work->q + tile->first_query * width, *k = work->k + tile->first_key * width;
  float *dq = work->dq + tile->first_query * width, *dk = work->dk + tile->first_key * width;
  product(n, width / PANEL, m, dlogits, TILE_STRIDE, 1, k, width, PANEL, work->rows, width, 0);
  memset(work->column_sum, 0, (size_t)(4 * width));
  for (Int i = 0; i < n; i++)
    for (Int x = 0; x < width; x += LANES) {
      const Int at = i * width + x;
      store(dq + at, load(dq + at) + load(work->rows + at) * load(gain + x));
      store(work->column_sum + x, load(work->column_sum + x) + load(work->rows + at) * load(q + at));
      store(work->scaled_q + at, load(q + at) * load(gain + x));
    }
  if (grads->gain) add_scaled(width, 1, work->column_sum, grads->gain + tile->column * width);
  product(m, width / PANEL, n, dlogits, 1, TILE_STRIDE, work->scaled_q, width, PANEL, dk, width, 1);
}

static void pair_gain_gradients(const Call *call, const Tile *tile, Backward *work, const Tables *tables,
                                TableGradients *grads) {
  const Int n = tile->queries, m = tile->keys, width = HEAD_WIDTH(call);
  const float *dlogits = INTERIOR(work->dlogits);
  const float *q = work->q + tile->first_query * width, *k = work->k + tile->first_key * width;
  float *dq = work->dq + tile->first_query * width, *dk = work->dk + tile->first_key * width;
  for (Int i = 0; i < n; i++)
    for (Int j = 0; j < m; j++) {
      const float x = dlogits[i * TILE_STRIDE + j];
      if (x == 0) continue;
      const Int at = (tile->kind == BAND ? tile->column + j - i : column_of(call, tile, i, j)) * width;
      const float *gain = tables->gain_rows + at;
      for (Int y = 0; y < width; y += LANES) {
        const vec qq = x * load(q + i * width + y), kk = load(k + j * width + y), gg = load(gain + y);
        store(dq + i * width + y, load(dq + i * width + y) + x * kk * gg);
        store(dk + j * width + y, load(dk + j * width + y) + qq * gg);
        if (grads->gain) store(grads->gain + at + y, load(grads->gain + at + y) + qq * kk);
      }
    }
}

/* The gradient of a scalar gain; then multiplies `dlogits` by the gain, for the gradients of q and k */
static void scalar_gain_gradients(const Call *call, const Tile *tile, Backward *work, const Tables *tables,
                                  TableGradients *grads) {
  const Int n = tile->queries, m = tile->keys;
  float *dlogits = INTERIOR(work->dlogits), *content = INTERIOR(work->content);
  if (grads->gain) {
    for (Int i = 0; i < n; i++) {
      float *row = content + i * TILE_STRIDE;
      for (Int j = 0; j < m; j += LANES) store(row + j, load(row + j) * load(dlogits + i * TILE_STRIDE + j));
      clear_after(row, m);
    }
    collect_scalars(call, tile, work, content, grads->gain);
  }
  for (Int i = 0; i < n; i++)
    for (Int j = 0; j < m; j += LANES) {
      const vec x = numbers_at(call, tile, tables->gain, i, j);
      store(dlogits + i * TILE_STRIDE + j, load(dlogits + i * TILE_STRIDE + j) * x);
    }
}

/* The gradients of the queries and keys of the content products, of each part from its own pairs */
static void content_gradients(const Call *call, const Tile *tile, Backward *work) {
  const Int n = tile->queries, m = tile->keys, width = HEAD_WIDTH(call);
  const Int query = tile->first_query * width, key = tile->first_key * width;
  for (int part = NEAR; part <= RIGHT; part *= 2) {
    if (!(tile->parts & part)) continue;
    const float *q = part == NEAR ? work->q : part == LEFT ? work->left : work->right;
    const float *k = part == NEAR ? work->k : work->distant, *w = INTERIOR(work->dlogits);
    float *dq = part == NEAR ? work->dq : part == LEFT ? work->dleft : work->dright;
    float *dk = part == NEAR ? work->dk : work->ddistant;
    if (tile->parts != part) {
      select_part(call, tile, part, w, INTERIOR(work->transposed), 1);
      w = INTERIOR(work->transposed);
    }
    product(n, width / PANEL, m, w, TILE_STRIDE, 1, k + key, width, PANEL, dq + query, width, 1);
    product(m, width / PANEL, n, w, 1, TILE_STRIDE, q + query, width, PANEL, dk + key, width, 1);
  }
}

static void backward_tile(const Call *call, const Tile *tile, Backward *work, const Tables *tables,
                          TableGradients *grads) {
  const Int n = tile->queries, m = tile->keys, first_query = tile->first_query, first_key = tile->first_key;
  const Int width = HEAD_WIDTH(call);
  float *logits = INTERIOR(work->logits), *dlogits = INTERIOR(work->dlogits);
  const Operands operands = {
      .q = work->q + first_query * width,
      .raw_q = work->raw_q + first_query * QUERY_WIDTH(call),
      .k_panels = work->k_panels + first_key * call->head_dim,
      .left = OFFSET(work->left, first_query * width),
      .right = OFFSET(work->right, first_query * width),
      .distant_panels = OFFSET(work->distant_panels, first_key * call->head_dim),
      .k = work->k + first_key * width,
      .raw_k = work->raw_k + first_key * KEY_WIDTH(call),
      .far_query_term = {work->far_query_term[0] + first_query, work->far_query_term[1] + first_query},
      .far_key_term = {work->far_key_term[0] + first_key, work->far_key_term[1] + first_key},
      .query_level = {OFFSET(work->query_level[0], first_query), OFFSET(work->query_level[1], first_query)},
      .key_level = {OFFSET(work->key_level[0], first_key), OFFSET(work->key_level[1], first_key)},
      .temperature = OFFSET(work->temperature, first_query),
      .tables = tables,
      .transposed = INTERIOR(work->transposed),
      .scaled_q = work->scaled_q,
      .untempered = work->untempered ? INTERIOR(work->untempered) : NULL,
      .slope = work->slope ? INTERIOR(work->slope) : NULL,
  };
  if (work->norms && vanishes(call, tile, &operands, work->norms + first_query, work->longest[first_key / TILE],
                              work->lse + 2 * first_query, 2))
    return;
  tile_logits(call, tile, &operands, logits, tables->gain ? INTERIOR(work->content) : NULL);
  logit_gradients(call, tile, work, tables, logits);
  if (call->softcap > 0) uncap_gradients(tile, logits, operands.slope, dlogits);
  value_gradients(call, tile, work, grads);
  if (call->temperature.data) temperature_gradients(tile, work);
  if (grads->bias) collect_scalars(call, tile, work, dlogits, grads->bias);
  if (HAS_LEVELS(call)) level_gradients(call, tile, work, &operands, grads);
  const float scale = (float)call->scale;
  for (Int i = 0; i < n; i++)
    for (Int j = 0; j < m; j += LANES) {
      float *at = dlogits + i * TILE_STRIDE + j;
      store(at, load(at) * scale);
    }
  if (tables->query_rows || tables->key_rows) {
    if (tile->kind == FAR) far_vector_gradients(call, tile, work, tables, grads);
    if (tile->kind == BAND) band_vector_gradients(call, tile, work, tables, grads);
    if (tile->kind == SCATTER) scatter_vector_gradients(call, tile, work, tables, grads);
  }
  if (tables->gain_rows) {
    (tile->kind == FAR ? far_gain_gradients : pair_gain_gradients)(call, tile, work, tables, grads);
    return;
  }
  if (tables->gain) scalar_gain_gradients(call, tile, work, tables, grads);
  content_gradients(call, tile, work);
}

/* −Σ_i (weight of the sink) · delta_i, over the queries of a head */
static float sink_gradient(const Call *call, Int h, const Backward *work) {
  double sum = 0;
  for (Int i = 0; i < call->queries; i++)
    sum -= (double)expf(call->sinks[h] - work->lse[2 * i] - work->lse[2 * i + 1]) * work->delta[i];
  return (float)sum;
}

/* Levels and temperatures of a head, with gradients of 0 */
static void read_head_numbers(const Call *call, Int b, Int h, Backward *work) {
  const size_t queries = (size_t)call->queries, keys = (size_t)call->keys;
  if (call->query_level.data)
    read_numbers(&call->query_level, b, h, 0, call->queries, work->query_level[0], work->query_level[1]);
  if (call->key_level.data) read_numbers(&call->key_level, b, h, 0, call->keys, work->key_level[0], work->key_level[1]);
  if (call->temperature.data) read_numbers(&call->temperature, b, h, 0, call->queries, work->temperature, NULL);
  if (HAS_LEVELS(call)) memset(work->dquery_level, 0, 8 * queries), memset(work->dkey_level, 0, 8 * keys);
  if (call->temperature.data) memset(work->dtemperature, 0, 8 * queries);
}

static void write_head_numbers(const Call *call, Int b, Int h, const Backward *work) {
  if (call->query_level.data) write_numbers(&call->dquery_level, b, h, call->queries, work->dquery_level);
  if (call->key_level.data) write_numbers(&call->dkey_level, b, h, call->keys, work->dkey_level);
  if (call->temperature.data) write_numbers(&call->dtemperature, b, h, call->queries, work->dtemperature);
}

/* The gradients of one query head; those of its keys, values and tables are added to `work` */
static void backward_head(const Call *call, Int b, Int h, Backward *work, const Tables *tables) {
  const Int d = call->head_dim, width = HEAD_WIDTH(call), value_width = VALUE_WIDTH(call), queries = call->queries;
  const Int query_dim = call->query_dim, query_width = QUERY_WIDTH(call);
  read_rows(&call->q, call->bf16, b, h, 0, queries, d, width, work->q);
  if (call->raw_q.data)
    read_rows(&call->raw_q, call->raw_q_bf16, b, h, 0, queries, query_dim, query_width, work->raw_q);
  if (call->distant.data) {
    read_rows(&call->left, call->bf16, b, h, 0, queries, d, width, work->left);
    read_rows(&call->right, call->bf16, b, h, 0, queries, d, width, work->right);
    memset(work->dleft, 0, (size_t)(4 * queries * width));
    memset(work->dright, 0, (size_t)(4 * queries * width));
  }
  read_head_numbers(call, b, h, work);
  read_rows(&call->grad, 0, b, h, 0, queries, call->value_dim, value_width, work->grad);
  memcpy(work->lse, call->lse + (b * call->heads + h) * queries * 2, (size_t)(8 * queries));
  for (Int i = 0; i < queries; i++) { /* Σ_j weight · gradient of the weight = gradient · output */
    read_rows(&call->out, 0, b, h, i, 1, call->value_dim, value_width, work->rows);
    float sum = 0;
    for (Int x = 0; x < call->value_dim; x++) sum += work->rows[x] * work->grad[i * value_width + x];
    work->delta[i] = sum;
  }
  if (work->norms) {
    find_norms(queries, width, work->q, work->norms);
    /* NaN where a gradient or an output is not finite: weights of 0 make NaN of it */
    for (Int i = 0; i < queries; i++) work->norms[i] += work->delta[i] * 0.0f;
  }
  if (call->dsinks) call->dsinks[b * call->heads + h] = sink_gradient(call, h, work);
  memset(work->dq, 0, (size_t)(4 * queries * width));
  if (call->raw_q.data) memset(work->draw_q, 0, (size_t)(4 * queries * query_width));
  if (call->query) far_terms(call, queries, query_width, work->raw_q, tables->query_rows, work->far_query_term);
  if (call->key) far_terms(call, call->keys, KEY_WIDTH(call), work->raw_k, tables->key_rows, work->far_key_term);
  if (call->value) far_terms(call, queries, value_width, work->grad, tables->value_rows, work->far_value_term);
  for (Int first_key = 0; first_key < call->keys; first_key += TILE)
    for (Int first_query = 0; first_query < queries; first_query += TILE) {
      const Tile tile = make_tile(call, b, h, first_query, first_key, work->q_spans, work->k_spans);
      if (tile.kind != SKIP) backward_tile(call, &tile, work, tables, &work->head_grads);
    }
  if (call->distant.data) {
    write_rows(&call->dleft, call->bf16, b, h, 0, queries, d, width, work->dleft);
    write_rows(&call->dright, call->bf16, b, h, 0, queries, d, width, work->dright);
  }
  write_head_numbers(call, b, h, work);
  write_rows(&call->dq, call->bf16, b, h, 0, queries, d, width, work->dq);
  if (call->raw_q.data)
    write_rows(&call->draw_q, call->raw_q_bf16, b, h, 0, queries, query_dim, query_width, work->draw_q);
}

/* Adds n numbers to others and sets them to zero */
static void move_sums(float *from, float *to, Int n) {
  if (!from) return;
  add_scaled(n, 1, from, to);
  memset(from, 0, (size_t)(4 * n));
}

static void move_table_gradients(const Call *call, TableGradients *from, TableGradients *to) {
  const Int columns = PADDED_COLUMNS(call), width = HEAD_WIDTH(call);
  move_sums(from->bias, to->bias, columns);
  move_sums(from->gain, to->gain, columns * (call->vector_gain ? width : 1));
  move_sums(from->query, to->query, columns * QUERY_WIDTH(call));
  move_sums(from->key, to->key, columns * KEY_WIDTH(call));
  move_sums(from->value, to->value, columns * VALUE_WIDTH(call));
  move_sums(from->level, to->level, columns);
}

/* The gradients of tables, of each thread and of each head that the thread may meet. Heads share them if no table is
   per head. Threads take tasks by key/value head, then by batch, so that each meets few heads. */
typedef struct {
  float *memory;
  Int size;  /* of the gradients of one head, in floats */
  Int slots; /* heads per thread */
  Int team;  /* threads */
} GradientMemory;

static TableGradients gradients_at(const Call *call, const GradientMemory *all, Int thread, Int slot) {
  Arena arena = {all->memory + (thread * all->slots + slot) * all->size, 0};
  TableGradients grads;
  allocate_table_gradients(call, &arena, &grads);
  return grads;
}

/* The first query head of a thread's tasks, which has slot 0 */
static Int first_head(const Call *call, Int team, Int thread) {
  const Int tasks = call->batch * call->kv_heads, group = call->heads / call->kv_heads;
  return tasks * thread / team / call->batch * group;
}

/* All gradients of one key/value head of one sequence */
static void backward_task(const Call *call, Int b, Int kv, Int thread, Backward *work, const Tables *tables,
                          const GradientMemory *all) {
  const Int d = call->head_dim, width = HEAD_WIDTH(call), dv = call->value_dim, value_width = VALUE_WIDTH(call);
  const Int keys = call->keys, group = call->heads / call->kv_heads, key_dim = call->key_dim;
  const Int key_width = KEY_WIDTH(call);
  read_rows(&call->k, call->bf16, b, kv, 0, keys, d, width, work->k);
  if (call->raw_k.data) read_rows(&call->raw_k, call->raw_k_bf16, b, kv, 0, keys, key_dim, key_width, work->raw_k);
  into_panels(keys, d, width, work->k, work->k_panels);
  if (call->distant.data) {
    read_rows(&call->distant, call->bf16, b, kv, 0, keys, d, width, work->distant);
    into_panels(keys, d, width, work->distant, work->distant_panels);
    memset(work->ddistant, 0, (size_t)(4 * keys * width));
  }
  read_rows(&call->v, call->bf16, b, kv, 0, keys, dv, value_width, work->dv); /* its memory is not in use yet */
  into_panels(keys, dv, value_width, work->dv, work->v_panels);
  if (work->longest) find_longest_keys(call, work->k, work->dv, work->longest);
  find_spans(call->q_pos + b * call->q_pos_stride, call->queries, work->q_spans);
  find_spans(call->k_pos + b * call->k_pos_stride, keys, work->k_spans);
  memset(work->dv, 0, (size_t)(4 * keys * value_width));
  memset(work->dk, 0, (size_t)(4 * keys * width));
  if (call->raw_k.data) memset(work->draw_k, 0, (size_t)(4 * keys * key_width));
  for (Int h = kv * group; h < (kv + 1) * group; h++) {
    backward_head(call, b, h, work, tables + h);
    const Int slot = tables_per_head(call) ? h - first_head(call, all->team, thread) : 0;
    TableGradients grads = gradients_at(call, all, thread, slot);
    move_table_gradients(call, &work->head_grads, &grads);
  }
  write_rows(&call->dk, call->bf16, b, kv, 0, keys, d, width, work->dk);
  if (call->distant.data) write_rows(&call->ddistant, call->bf16, b, kv, 0, keys, d, width, work->ddistant);
  if (call->raw_k.data) write_rows(&call->draw_k, call->raw_k_bf16, b, kv, 0, keys, key_dim, key_width, work->draw_k);
  write_rows(&call->dv, call->bf16, b, kv, 0, keys, dv, value_width, work->dv);
}

/* Adds the gradients of a head's table to the result, columns of the padding to the one at that end */
static void add_columns(const Call *call, const float *from, Int d, Int width, float *to) {
  for (Int e = 0; e < PADDED_COLUMNS(call); e++) {
    const Int column = max_of(0, min_of(e - COLUMN_PADDING, call->columns - 1));
    for (Int k = 0; k < d; k++) to[column * d + k] += from[e * width + k];
  }
}

/* The sum over threads, always in the same order */
static void sum_table_gradients(const Call *call, const GradientMemory *all) {
  const Int d = call->head_dim, width = HEAD_WIDTH(call);
  for (Int thread = 0; thread < all->team; thread++)
    for (Int slot = 0; slot < all->slots; slot++) {
      const Int h = first_head(call, all->team, thread) + slot;
      if (h >= call->heads) break;
      const TableGradients grads = gradients_at(call, all, thread, slot);
#define GRADIENT_OF_HEAD(name, size) (call->d##name + (call->name##_heads == 1 ? 0 : h) * call->columns * (size))
      if (grads.bias) add_columns(call, grads.bias, 1, 1, GRADIENT_OF_HEAD(bias, 1));
      if (grads.level) add_columns(call, grads.level, 1, 1, GRADIENT_OF_HEAD(level, 1));
      if (grads.gain && !call->vector_gain) add_columns(call, grads.gain, 1, 1, GRADIENT_OF_HEAD(gain, 1));
      if (grads.gain && call->vector_gain) add_columns(call, grads.gain, d, width, GRADIENT_OF_HEAD(gain, d));
      if (grads.query)
        add_columns(call, grads.query, call->query_dim, QUERY_WIDTH(call), GRADIENT_OF_HEAD(query, call->query_dim));
      if (grads.key) add_columns(call, grads.key, call->key_dim, KEY_WIDTH(call), GRADIENT_OF_HEAD(key, call->key_dim));
      if (grads.value)
        add_columns(call, grads.value, call->value_dim, VALUE_WIDTH(call), GRADIENT_OF_HEAD(value, call->value_dim));
#undef GRADIENT_OF_HEAD
    }
}

/* 0, or 1 if there is not enough memory. A task is a key/value head of a sequence. */
int locant_backward(const Call *call) {
  const Int tasks = call->batch * call->kv_heads, threads = thread_count(call, tasks);
  float *table_memory = NULL, *memory = NULL;
  Tables *tables = make_tables(call, 1, &table_memory);
  Arena size = {0}, gradient_size = {0};
  Backward one;
  TableGradients none;
  allocate_backward(call, &size, &one);
  allocate_table_gradients(call, &gradient_size, &none);
  if (tables) memory = allocate_zeros(size.used * threads);
  if (!memory) {
    if (tables) free(table_memory);
    free(tables);
    return 1;
  }
  GradientMemory all = {.size = gradient_size.used, .slots = 1};
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    {
      all.team = team_size();
      if (tables_per_head(call)) {
        const Int kv_heads = (tasks + all.team - 1) / all.team / call->batch + 2; /* a thread meets no more */
        all.slots = min_of(call->kv_heads, kv_heads) * (call->heads / call->kv_heads);
      }
      all.memory = allocate_zeros(all.size * all.slots * all.team + 1);
    }
    const Int thread = thread_number(), from = tasks * thread / all.team;
    const Int to = all.memory ? tasks * (thread + 1) / all.team : from;
    Arena arena = {memory + thread * size.used, 0};
    Backward work;
    allocate_backward(call, &arena, &work);
    for (Int task = from; task < to; task++)
      backward_task(call, task % call->batch, task / call->batch, thread, &work, tables, &all);
  }
  const int failed = !all.memory;
  if (!failed) sum_table_gradients(call, &all);
  free(all.memory);
  free(memory);
  free(table_memory);
  free(tables);
  return failed;
}
