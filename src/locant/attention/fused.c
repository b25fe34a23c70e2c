/* Attention with every table of `locant.terms.Terms`, forward and backward, in tiles: memory linear in the length.

   logit_ij = scale · ( (q_i ∘ gain_r)·k_j  +  p_i·query_r  +  t_j·key_r )  +  bias_r        r = k_pos[j] − q_pos[i]
   out_i    = Σ_j softmax(logit)_ij · (v_j + value_r)

   q and k are the (possibly rotated) content; p and t the unrotated q and k. Tables have `columns` columns, the first
   for r = lo; an offset beyond either end takes the last column on that side.

   A tile is up to TILE queries by TILE keys. How its offsets lie decides how it is computed:

     SKIP     no query sees a key;
     FAR      every pair is at or beyond one end of the tables: one column serves all, so vectors instead of products;
     BAND     r = base + j − i: products of a query with a run of columns are a matrix product, whose rows are then
              needed each one place further left. The product is written with a row stride one longer than the tile's
              (and read so in the backward pass), which is that shift;
     SCATTER  anything else (a tile in which packed sequences meet): pair by pair.

   Everything is float32 inside. One matrix kernel, `micro`, does the work; its second operand is read NR lanes
   at a time. Plain C with GNU vectors: gcc or clang, any CPU; the compiler is told which. */

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

typedef int64_t I;

/* ---------------------------------------------------------------- vectors */

#if defined(__AVX512F__)
#define VL 16
#define MR 12
#elif defined(__AVX__)
#define VL 8
#define MR 6
#elif defined(__aarch64__)
#define VL 4
#define MR 8
#else
#define VL 4
#define MR 6
#endif
#define NV 2
#define NR (VL * NV)
#define TILE 128
#define MARGIN (2 * NR) /* a shifted product reaches up to NR + MR beyond its tile on either side */
#define LD (TILE + 2 * MARGIN)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * VL)));
typedef int32_t ivec __attribute__((vector_size(4 * VL)));
typedef uint32_t uvec __attribute__((vector_size(4 * VL)));
typedef float loose __attribute__((vector_size(4 * VL), aligned(4), may_alias));

INLINE vec get(const float *p) { return *(const loose *)p; }
INLINE void put(float *p, vec x) { *(loose *)p = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec pick(ivec which, vec a, vec b) { return (vec)((which & (ivec)a) | (~which & (ivec)b)); }
INLINE vec larger(vec a, vec b) { return pick(a > b, a, b); }
INLINE float sum_lanes(vec x) {
  float s = 0;
  for (int i = 0; i < VL; i++) s += x[i];
  return s;
}
INLINE float max_lanes(vec x) {
  float s = x[0];
  for (int i = 1; i < VL; i++) s = x[i] > s ? x[i] : s;
  return s;
}

/* a0 b0 a1 b1 … of the lower and of the upper halves */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#if VL == 16
#define ALTERNATE_LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ALTERNATE_HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif VL == 8
#define ALTERNATE_LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ALTERNATE_HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define ALTERNATE_LOW(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define ALTERNATE_HIGH(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#endif

/* e^x to about 1 unit in the last place; 0 below the smallest normal number, NaN of NaN */
INLINE vec exp_(vec x) {
  const ivec tiny = x < -87.33654f;
  vec y = pick(tiny, all(-87.33654f), x);
  const vec shifted = y * 1.44269504f + 12582912.0f; /* 1.5 · 2^23: the sum is rounded to a whole number */
  const vec n = shifted - 12582912.0f;
  vec r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const ivec power = ((ivec)shifted << 23) + (ivec)p;
  return pick(x != x, x, (vec)(~tiny & power));
}

/* ---------------------------------------------------------------- products */

/* C[i][lane] (+)= Σ_k A[i·rs + k·cs] · B[k·bs + lane], for `rows` ≤ MR rows and NR lanes */
INLINE void micro(const int rows, I kk, const float *a, I rs, I cs, const float *b, I bs, float *c, I ldc, int add) {
  vec acc[MR][NV];
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int u = 0; u < NV; u++) acc[i][u] = (vec){0};
  for (I k = 0; k < kk; k++) {
    vec y[NV];
#pragma GCC unroll 4
    for (int u = 0; u < NV; u++) y[u] = get(b + u * VL);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
      const vec x = all(a[i * rs]);
#pragma GCC unroll 4
      for (int u = 0; u < NV; u++) acc[i][u] += x * y[u];
    }
    a += cs;
    b += bs;
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int u = 0; u < NV; u++) put(c + i * ldc + u * VL, add ? get(c + i * ldc + u * VL) + acc[i][u] : acc[i][u]);
}

static void block(int rows, I kk, const float *a, I rs, I cs, const float *b, I bs, float *c, I ldc, int add) {
  switch (rows) {
#define CASE(N) case N: micro(N, kk, a, rs, cs, b, bs, c, ldc, add); break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MR > 6
    CASE(7) CASE(8)
#endif
#if MR > 8
    CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
  }
}

INLINE I least(I a, I b) { return a < b ? a : b; }
INLINE I most(I a, I b) { return a > b ? a : b; }
INLINE I up(I x, I to) { return (x + to - 1) / to * to; }

/* n rows by `panels` panels of NR lanes; B's rows are `bs` apart, its panels `apart` */
static void product(I n, I panels, I kk, const float *a, I rs, I cs, const float *b, I bs, I apart, float *c, I ldc,
                    int add) {
  for (I p = 0; p < panels; p++)
    for (I i = 0; i < n; i += MR)
      block((int)least(MR, n - i), kk, a + i * rs, rs, cs, b + p * apart, bs, c + i * ldc + p * NR, ldc, add);
}

/* S[i][j] += x_i · table[e + j − i]; the table in panels of NR columns, [columns / NR][d][NR] */
static void add_band(I n, I m, I d, const float *x, I dp, const float *table, I e, float *s) {
  for (I p = (e - n - NR) / NR; p <= (e + m) / NR; p++) {
    const I s0 = p * NR - e; /* j − i of the panel's first lane */
    for (I i = 0; i < n; i += MR) {
      const I rows = least(MR, n - i);
      if (s0 + NR - 1 + i + rows - 1 < 0 || s0 + i >= m) continue;
      block((int)rows, d, x + i * dp, dp, 1, table + p * d * NR, NR, s + i * (LD + 1) + s0, LD + 1, 1);
    }
  }
}

/* out_i += Σ_j W[i][j] · table[e + j − i]; the table in rows of dp. W is zero around the tile; `row` and `column` are
   its strides. With them exchanged and step −1 it is out_j += Σ_i W[i][j] · table[e + j − i]. */
static void spread_band(I n, I m, I dp, const float *w, I row, I column, const float *table, I e, I step, float *out) {
  for (I p = 0; p < dp; p += NR)
    for (I i = 0; i < n; i += MR) {
      const I rows = least(MR, n - i), s0 = -(i + rows - 1); /* the first j − i that a row of this block needs */
      block((int)rows, m + rows - 1, w + i * (row + column) + s0 * column, row + column, column,
            table + (e + step * s0) * dp + p, step * dp, out + i * dp + p, dp, 1);
    }
}

/* table[e + s] += Σ_i W[i][i + s] · x_i for every s in the tile. With strides exchanged and step −1,
   table[e − s] += Σ_j W[j + s][j] · x_j. */
static void collect_band(I n, I m, I dp, const float *w, I row, I column, const float *x, I e, I step, float *table) {
  for (I p = 0; p < dp; p += NR)
    for (I s = 1 - n; s < m; s += MR) {
      const I rows = least(MR, m - s), from = most(0, -(s + rows - 1)), to = least(n, m - s);
      block((int)rows, to - from, w + from * (row + column) + s * column, column, row + column, x + from * dp + p, dp,
            table + (e + step * s) * dp + p, step * dp, 1);
    }
}

/* S[i][j] += T[j][i] */
static void add_transposed(I n, I m, float *s, const float *t) {
  for (I i = 0; i < n; i += VL)
    for (I j = 0; j < m; j += VL) {
      vec a[VL], b[VL];
#pragma GCC unroll 16
      for (int u = 0; u < VL; u++) a[u] = get(t + (j + u) * LD + i);
      /* log2(VL) times: lanes of rows u and u + VL/2 alternate */
#pragma GCC unroll 4
      for (int step = 1; step < VL; step *= 2) {
#pragma GCC unroll 8
        for (int u = 0; u < VL / 2; u++) {
          b[2 * u] = ALTERNATE_LOW(a[u], a[u + VL / 2]);
          b[2 * u + 1] = ALTERNATE_HIGH(a[u], a[u + VL / 2]);
        }
#pragma GCC unroll 16
        for (int u = 0; u < VL; u++) a[u] = b[u];
      }
#pragma GCC unroll 16
      for (int u = 0; u < VL; u++) put(s + (i + u) * LD + j, get(s + (i + u) * LD + j) + a[u]);
    }
}

/* S[i][j] = Σ_d x_i[d] · y_j[d] · table[e + j − i][d]; y in panels of NR keys, the table as [d][width] */
static void gain_band(I n, I m, I d, const float *x, I dp, const float *y, const float *table, I width, I e, float *s) {
  for (I j = 0; j < m; j += NR)
    for (I i = 0; i < n; i += 4) { /* rows beyond n are there, and not looked at */
      vec acc[4][NV] = {{{0}}};
      const float *yy = y + j * d, *g = table + e + j - i;
      for (I k = 0; k < d; k++, yy += NR, g += width) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
          for (int u = 0; u < NV; u++) acc[r][u] += all(x[(i + r) * dp + k]) * get(g - r + u * VL) * get(yy + u * VL);
      }
      for (int r = 0; r < 4; r++)
        for (int u = 0; u < NV; u++) put(s + (i + r) * LD + j + u * VL, acc[r][u]);
    }
}

INLINE float dot(I dp, const float *x, const float *y) {
  vec sum = {0};
  for (I k = 0; k < dp; k += VL) sum += get(x + k) * get(y + k);
  return sum_lanes(sum);
}

INLINE void add_scaled(I dp, float w, const float *x, float *y) {
  for (I k = 0; k < dp; k += VL) put(y + k, get(y + k) + w * get(x + k));
}

/* ---------------------------------------------------------------- a call */

typedef struct {
  void *data;
  I stride[4]; /* in elements */
} View;

typedef struct {
  I batch, heads, kv_heads, lq, lk, d, dv;
  I columns, lo;            /* of the tables */
  I causal, bf16, threads;
  I raw;                    /* raw_q and raw_k differ from q and k */
  I gain_vector;            /* gain is [heads, columns, d], not [heads, columns] */
  I seed;
  double scale, dropout;
  View q, k, v, raw_q, raw_k;
  View out;                 /* float32, whatever the rest is: the backward pass starts from it */
  View mask;                /* bytes, strides 0 where it broadcasts; data NULL if there is none */
  const I *q_pos, *k_pos;
  I q_pos_stride, k_pos_stride; /* from row to row of the batch, 0 if all are alike */
  const float *bias, *gain, *query, *key, *value; /* contiguous, NULL if not there */
  I bias_heads, gain_heads, query_heads, key_heads, value_heads; /* 1 or heads */
  float *lse;               /* [batch, heads, lq, 2]: the largest logit, and the logarithm of the sum beside it */
  View grad;                /* float32 */
  View dq, dk, dv_, draw_q, draw_k;
  float *dbias, *dgain, *dquery, *dkey, *dvalue; /* as the tables; zero on entry */
} Call;

I locant_call_size(void) { return sizeof(Call); }

I locant_lanes(void) { return VL; }

/* dp and dvp: head sizes rounded up to whole panels, the rest is 0 */
#define DP(c) up((c)->d, NR)
#define DVP(c) up((c)->dv, NR)
#define PAD up(2 * TILE + 2 * NR, NR)                 /* columns added on either side: copies of the last one */
#define EXT(c) up((c)->columns + 2 * PAD, NR)
#define KEYS(c) up((c)->lk, TILE)
#define QUERIES(c) up((c)->lq, TILE)
#define ROWS (TILE + 2 * MR)                          /* of a tile with zeros around it */
#define CELLS (ROWS * LD + 2 * MARGIN)
#define INSIDE(tile) ((tile) + MR * LD + MARGIN)
#define GAIN_WIDTH(c) (EXT(c) + 3 * VL)               /* not a multiple of a page */

/* A piece of memory handed out in parts. Measured with data NULL, then handed out for good. */
typedef struct {
  float *data;
  I used;
} Arena;

static float *take(Arena *arena, I n) {
  float *at = arena->data ? arena->data + arena->used : NULL;
  arena->used += up(n, 64);
#ifdef __SANITIZE_ADDRESS__ /* a gap between parts, where nothing may reach */
  if (at) ASAN_POISON_MEMORY_REGION(at + up(n, 2), (size_t)(4 * (up(n, 64) + 64 - up(n, 2))));
  arena->used += 64;
#endif
  return at;
}

static float *zeros(I n) {
  float *p = aligned_alloc(256, (size_t)up(4 * n + 256, 256));
  if (p) memset(p, 0, (size_t)(4 * n));
  return p;
}

INLINE float value_of(const void *p, I at, I bf16) {
  if (!bf16) return ((const float *)p)[at];
  const uint32_t bits = (uint32_t)((const uint16_t *)p)[at] << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

INLINE void set_value(void *p, I at, I bf16, float x) {
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

/* rows [n][dp] of a head, the padding left as it is (0) */
static void read_rows(const View *x, I bf16, I b, I h, I from, I n, I d, I dp, float *rows) {
  const I base = b * x->stride[0] + h * x->stride[1];
  for (I i = 0; i < n; i++) {
    const I at = base + (from + i) * x->stride[2];
    if (!bf16 && x->stride[3] == 1)
      memcpy(rows + i * dp, (const float *)x->data + at, (size_t)(4 * d));
    else
      for (I k = 0; k < d; k++) rows[i * dp + k] = value_of(x->data, at + k * x->stride[3], bf16);
  }
}

static void write_rows(const View *x, I bf16, I b, I h, I from, I n, I d, I dp, const float *rows) {
  const I base = b * x->stride[0] + h * x->stride[1];
  for (I i = 0; i < n; i++)
    for (I k = 0; k < d; k++)
      set_value(x->data, base + (from + i) * x->stride[2] + k * x->stride[3], bf16, rows[i * dp + k]);
}

/* rows [n][dp] as panels of NR rows, [n / NR][d][NR]; rows beyond n are 0 */
static void into_panels(I n, I d, I dp, const float *rows, float *panels) {
  for (I p = 0; p < up(n, NR); p += NR)
    for (I k = 0; k < d; k++)
      for (I l = 0; l < NR; l++) panels[p * d + k * NR + l] = p + l < n ? rows[(p + l) * dp + k] : 0;
}

/* ---------------------------------------------------------------- tables */

/* One head's tables over EXT columns. Vectors as rows [EXT][dp] and as panels of columns [EXT / NR][d][NR]; the panels
   of `key` in reverse order, because it is added to a transposed tile. */
typedef struct {
  float *bias, *gain, *gain_rows, *gain_lanes;
  float *query_rows, *query_panels, *key_rows, *key_panels, *value_rows, *value_panels;
} Tables;

static void take_tables(const Call *c, int backward, Arena *arena, Tables *t) {
  const I ext = EXT(c);
  memset(t, 0, sizeof *t);
  if (c->bias) t->bias = take(arena, ext);
  if (c->gain && !c->gain_vector) t->gain = take(arena, ext);
  if (c->gain && c->gain_vector) {
    t->gain_rows = take(arena, ext * DP(c));
    t->gain_lanes = take(arena, GAIN_WIDTH(c) * c->d + 8 * NR);
  }
  if (c->query) t->query_rows = take(arena, ext * DP(c)), t->query_panels = take(arena, ext * c->d);
  if (c->key) t->key_rows = take(arena, ext * DP(c)), t->key_panels = take(arena, ext * c->d);
  if (c->value) t->value_rows = take(arena, ext * DVP(c));
  if (c->value && backward) t->value_panels = take(arena, ext * c->dv);
}

/* rows [columns][d], column 0 and the last one repeated outwards */
static void extend(const Call *c, const float *table, I d, I dp, float *rows) {
  for (I e = 0; e < EXT(c); e++) {
    const I column = most(0, least(e - PAD, c->columns - 1));
    memcpy(rows + e * dp, table + column * d, (size_t)(4 * d));
  }
}

static void fill_tables(const Call *c, I h, Tables *t) {
  const I ext = EXT(c), dp = DP(c), dvp = DVP(c);
#define OF(name, size) (c->name + (c->name##_heads == 1 ? 0 : h) * c->columns * (size))
  if (t->bias) extend(c, OF(bias, 1), 1, 1, t->bias);
  if (t->gain) extend(c, OF(gain, 1), 1, 1, t->gain);
  if (t->gain_rows) {
    extend(c, OF(gain, c->d), c->d, dp, t->gain_rows);
    for (I k = 0; k < c->d; k++)
      for (I e = 0; e < ext; e++) t->gain_lanes[k * GAIN_WIDTH(c) + e] = t->gain_rows[e * dp + k];
  }
  if (t->query_rows) {
    extend(c, OF(query, c->d), c->d, dp, t->query_rows);
    into_panels(ext, c->d, dp, t->query_rows, t->query_panels);
  }
  if (t->key_rows) {
    extend(c, OF(key, c->d), c->d, dp, t->key_rows);
    into_panels(ext, c->d, -dp, t->key_rows + (ext - 1) * dp, t->key_panels);
  }
  if (t->value_rows) extend(c, OF(value, c->dv), c->dv, dvp, t->value_rows);
  if (t->value_panels) into_panels(ext, c->dv, dvp, t->value_rows, t->value_panels);
#undef OF
}

/* ---------------------------------------------------------------- tiles */

typedef struct {
  I min, max, first;
  int regular; /* up by one from token to token */
} Span;

static void find_spans(const I *pos, I n, Span *spans) {
  for (I at = 0; at < n; at += TILE) {
    Span s = {pos[at], pos[at], pos[at], 1};
    for (I i = at + 1; i < least(n, at + TILE); i++) {
      s.min = least(s.min, pos[i]), s.max = most(s.max, pos[i]);
      s.regular &= pos[i] == pos[i - 1] + 1;
    }
    spans[at / TILE] = s;
  }
}

enum { SKIP, FAR, BAND, SCATTER };

typedef struct {
  int kind, hides; /* hides: some pair is not visible */
  I b, h, i0, n, j0, m;
  I e;             /* column of the tile's first pair if BAND; of every pair if FAR */
  int end;         /* which end if FAR: 0 or 1 */
  const I *q_pos, *k_pos; /* of the tile */
} Tile;

INLINE int visible(const Call *c, const Tile *t, I i, I j) {
  if (c->causal && t->k_pos[j] > t->q_pos[i]) return 0;
  const View *x = &c->mask;
  return !x->data || ((const uint8_t *)x->data)[t->b * x->stride[0] + t->h * x->stride[1] +
                                                (t->i0 + i) * x->stride[2] + (t->j0 + j) * x->stride[3]];
}

static Tile look(const Call *c, I b, I h, I i0, I j0, const Span *qs, const Span *ks) {
  Tile t = {.b = b, .h = h, .i0 = i0, .n = least(TILE, c->lq - i0), .j0 = j0, .m = least(TILE, c->lk - j0)};
  const Span *q = qs + i0 / TILE, *k = ks + j0 / TILE;
  t.q_pos = c->q_pos + b * c->q_pos_stride + i0;
  t.k_pos = c->k_pos + b * c->k_pos_stride + j0;
  if (c->causal && k->min > q->max) return t; /* SKIP */
  t.hides = c->causal && k->max > q->min;
  if (c->mask.data) {
    const I rows = c->mask.stride[2] ? t.n : 1;
    const uint8_t *bytes = (const uint8_t *)c->mask.data + b * c->mask.stride[0] + h * c->mask.stride[1] +
                           i0 * c->mask.stride[2] + j0 * c->mask.stride[3];
    I seen = 0;
    for (I i = 0; i < rows; i++)
      for (I j = 0; j < t.m; j++) seen += bytes[i * c->mask.stride[2] + j * c->mask.stride[3]] != 0;
    if (!seen) return t; /* SKIP */
    t.hides |= seen < rows * t.m;
  }
  const I low = k->min - q->max - c->lo, high = k->max - q->min - c->lo; /* columns, before they are held to the ends */
  if (!(c->bias || c->gain || c->query || c->key || c->value) || high <= 0)
    t.kind = FAR, t.end = 0, t.e = PAD;
  else if (low >= c->columns - 1)
    t.kind = FAR, t.end = 1, t.e = PAD + c->columns - 1;
  else if (q->regular && k->regular)
    t.kind = BAND, t.e = PAD + k->first - q->first - c->lo;
  else
    t.kind = SCATTER;
  return t;
}

INLINE I column(const Call *c, const Tile *t, I i, I j) {
  return PAD + most(0, least(t->k_pos[j] - t->q_pos[i] - c->lo, c->columns - 1));
}

/* For SCATTER: a row of a tile summed by column. `total` is zero but for the columns in `touched`, and again after
   `forget`. With long sums made of short ones the tables' gradients stay as exact as the rest. */
typedef struct {
  float *total;     /* [EXT] */
  I *touched, count; /* [TILE] */
} Tally;

static void tally(Tally *y, I e, float x) {
  if (x == 0) return;
  int known = 0;
  if (y->total[e] == 0)
    for (I n = 0; n < y->count && !known; n++) known = y->touched[n] == e; /* it came to 0 on the way */
  else
    known = 1;
  if (!known) y->touched[y->count++] = e;
  y->total[e] += x;
}

static void forget(Tally *y) {
  for (I n = 0; n < y->count; n++) y->total[y->touched[n]] = 0;
  y->count = 0;
}

/* What a tile is computed from; pointers are to its own first row */
typedef struct {
  const float *q, *raw_q;         /* rows of dp */
  const float *k_panels;          /* [m / NR][d][NR] */
  const float *k, *raw_k;         /* rows of dp */
  const float *far_q[2];          /* raw_q · query at either end */
  const float *far_k[2];          /* raw_k · key at either end */
  Tables *tables;
  float *turned;                  /* a tile, transposed */
  float *scaled;                  /* rows of q times the gain, if FAR */
} Operands;

/* The logits of a tile into S, −∞ where hidden and in the lanes beyond m. What lies around the tile is anything.
   `content`, if not NULL, gets the content product before a scalar gain. */
static void logits(const Call *c, const Tile *t, const Operands *o, float *s, float *content) {
  const I n = t->n, m = t->m, d = c->d, dp = DP(c);
  const Tables *tables = o->tables;
  if (tables->gain_rows && t->kind == BAND)
    gain_band(n, m, d, o->q, dp, o->k_panels, tables->gain_lanes, GAIN_WIDTH(c), t->e, s);
  else if (tables->gain_rows && t->kind == SCATTER) {
    for (I i = 0; i < n; i++)
      for (I j = 0; j < m; j++) {
        const float *g = tables->gain_rows + column(c, t, i, j) * dp, *q = o->q + i * dp, *k = o->k + j * dp;
        vec sum = {0};
        for (I x = 0; x < dp; x += VL) sum += get(q + x) * get(g + x) * get(k + x);
        s[i * LD + j] = sum_lanes(sum);
      }
  } else {
    const float *q = o->q;
    if (tables->gain_rows) { /* FAR */
      const float *g = tables->gain_rows + t->e * dp;
      for (I i = 0; i < n; i++)
        for (I x = 0; x < dp; x += VL) put(o->scaled + i * dp + x, get(q + i * dp + x) * get(g + x));
      q = o->scaled;
    }
    product(n, up(m, NR) / NR, d, q, dp, 1, o->k_panels, NR, d * NR, s, LD, 0);
  }
  if (content)
    for (I i = 0; i < n; i++) memcpy(content + i * LD, s + i * LD, (size_t)(4 * up(m, VL)));
  const float scale = (float)c->scale;
  if (t->kind == SCATTER) {
    for (I i = 0; i < n; i++)
      for (I j = 0; j < m; j++) {
        const I e = column(c, t, i, j);
        float x = s[i * LD + j];
        if (tables->gain) x *= tables->gain[e];
        if (tables->query_rows) x += dot(dp, o->raw_q + i * dp, tables->query_rows + e * dp);
        if (tables->key_rows) x += dot(dp, o->raw_k + j * dp, tables->key_rows + e * dp);
        s[i * LD + j] = scale * x + (tables->bias ? tables->bias[e] : 0);
      }
  } else {
    const int band = t->kind == BAND;
    /* A gain is of the content product alone: before products with vectors are added, else on the way */
    const int early = tables->gain && band && (tables->query_panels || tables->key_panels);
    const float *gain = early ? NULL : tables->gain;
    if (early)
      for (I i = 0; i < n; i++)
        for (I j = 0; j < m; j += VL) put(s + i * LD + j, get(s + i * LD + j) * get(tables->gain + t->e + j - i));
    if (band && tables->query_panels) add_band(n, m, d, o->raw_q, dp, tables->query_panels, t->e, s);
    if (band && tables->key_panels) {
      for (I j = 0; j < m; j++) memset(o->turned + j * LD, 0, 4 * TILE);
      add_band(m, n, d, o->raw_k, dp, tables->key_panels, EXT(c) - 1 - t->e, o->turned);
      add_transposed(n, m, s, o->turned);
    }
    const float *far_k = !band && tables->key_rows ? o->far_k[t->end] : NULL;
    for (I i = 0; i < n; i++) {
      const float row = !band && tables->query_rows ? o->far_q[t->end][i] : 0;
      const float *bias = tables->bias ? tables->bias + t->e : NULL;
      for (I j = 0; j < m; j += VL) {
        vec x = get(s + i * LD + j);
        if (gain) x *= band ? get(gain + t->e + j - i) : all(gain[t->e]);
        x += row;
        if (far_k) x += get(far_k + j);
        x *= scale;
        if (bias) x += band ? get(bias + j - i) : all(*bias);
        put(s + i * LD + j, x);
      }
    }
  }
  for (I i = 0; i < n; i++)
    for (I j = m; j < up(m, VL); j++) s[i * LD + j] = -INFINITY;
  if (t->hides)
    for (I i = 0; i < n; i++)
      for (I j = 0; j < m; j++)
        if (!visible(c, t, i, j)) s[i * LD + j] = -INFINITY;
}

/* The lanes of a row from m to the end of a tile, and what the next block of rows may read beyond it */
INLINE void clear_after(float *row, I m) {
  if (m < TILE) memset(row + m, 0, (size_t)(4 * (TILE - m)));
}

/* Dropout: 0 or 1 / (1 − p) for lanes j … j + VL − 1 of a row, from a hash of the pair alone */
INLINE uint32_t mixed(uint64_t x) {
  x ^= x >> 30, x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27, x *= 0x94d049bb133111ebu;
  return (uint32_t)(x >> 16);
}

typedef struct {
  uint32_t row, limit;
  float up;
} Drop;

INLINE Drop drop_row(const Call *c, const Tile *t, I i) {
  const uint64_t row = (uint64_t)((t->b * c->heads + t->h) * c->lq + t->i0 + i);
  const double limit = c->dropout * 4294967296.0;
  return (Drop){mixed((uint64_t)c->seed + row * 0x9e3779b97f4a7c15u), limit > 4294967295.0 ? 4294967295u : (uint32_t)limit,
                (float)(1 / (1 - c->dropout))};
}

INLINE vec kept(Drop drop, I j) {
  uvec x;
  for (int l = 0; l < VL; l++) x[l] = (uint32_t)(j + l);
  x = x * 0x9e3779b1u + drop.row;
  x ^= x >> 16, x *= 0x7feb352du;
  x ^= x >> 15, x *= 0x846ca68bu;
  x ^= x >> 16;
  return (vec)((ivec)(x >= drop.limit) & (ivec)all(drop.up));
}

/* x_i · (table at either end), for n rows */
static void far_products(const Call *c, I n, I d, const float *x, const float *table, float *low, float *high) {
  for (I i = 0; i < n; i++) {
    low[i] = dot(d, x + i * d, table + PAD * d);
    high[i] = dot(d, x + i * d, table + (PAD + c->columns - 1) * d);
  }
}

static I thread_count(const Call *c, I tasks) {
#ifdef _OPENMP
  return most(1, least(c->threads, tasks));
#else
  return 1;
#endif
}

/* How many threads there are in this region: not always as many as were asked for (OMP_THREAD_LIMIT, OMP_DYNAMIC, a
   region within a region), and the work must be divided among those that came */
static I team_size(void) {
#ifdef _OPENMP
  return omp_get_num_threads();
#else
  return 1;
#endif
}

static I thread_number(void) {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

/* Tables of every head that has its own, in one arena; NULL if memory ran out */
static Tables *make_tables(const Call *c, int backward, float **memory) {
  I heads = 1;
  if (most(most(c->bias_heads, c->gain_heads), most(c->query_heads, most(c->key_heads, c->value_heads))) > 1) heads = c->heads;
  Tables *tables = calloc((size_t)c->heads, sizeof(Tables));
  Arena arena = {0};
  Tables once;
  take_tables(c, backward, &arena, &once);
  *memory = zeros(arena.used * heads + 1);
  if (!tables || !*memory) {
    free(tables);
    free(*memory);
    return NULL;
  }
  arena = (Arena){*memory, 0};
  for (I h = 0; h < heads; h++) take_tables(c, backward, &arena, tables + h);
#pragma omp parallel for num_threads(thread_count(c, heads)) schedule(static)
  for (I h = 0; h < heads; h++) fill_tables(c, h, tables + h);
  for (I h = heads; h < c->heads; h++) tables[h] = tables[0];
  return tables;
}

/* ---------------------------------------------------------------- forward */

typedef struct {
  float *k, *raw_k, *k_panels, *v, *far_k[2];       /* of a head */
  float *q, *raw_q, *far_q[2], *out, *top, *total;  /* of a tile of queries */
  float *s, *weights, *turned, *scaled;             /* tiles */
  Span *q_spans, *k_spans;
} Forward;

static void take_forward(const Call *c, Arena *arena, Forward *f) {
  const I dp = DP(c), dvp = DVP(c);
  memset(f, 0, sizeof *f);
  f->k = take(arena, KEYS(c) * dp);
  f->raw_k = c->raw ? take(arena, KEYS(c) * dp) : f->k;
  f->k_panels = take(arena, KEYS(c) * c->d);
  f->v = take(arena, KEYS(c) * dvp);
  for (int end = 0; end < 2; end++) f->far_k[end] = take(arena, KEYS(c)), f->far_q[end] = take(arena, TILE);
  f->q = take(arena, (TILE + MR) * dp);
  f->raw_q = c->raw ? take(arena, (TILE + MR) * dp) : f->q;
  f->out = take(arena, TILE * dvp);
  f->top = take(arena, TILE);
  f->total = take(arena, TILE);
  f->s = take(arena, CELLS), f->weights = take(arena, CELLS), f->turned = take(arena, CELLS);
  f->scaled = take(arena, (TILE + MR) * dp);
  f->q_spans = (Span *)take(arena, (I)(sizeof(Span) / 4) * (QUERIES(c) / TILE));
  f->k_spans = (Span *)take(arena, (I)(sizeof(Span) / 4) * (KEYS(c) / TILE));
}

/* Weights of a tile, with what was summed before made to fit */
static void add_to_softmax(const Call *c, const Tile *t, Forward *f, const float *s, float *weights) {
  const I dvp = DVP(c);
  for (I i = 0; i < t->n; i++) {
    const float *row = s + i * LD;
    float *p = weights + i * LD;
    vec top = all(-INFINITY), sum = {0};
    for (I j = 0; j < t->m; j += VL) top = larger(get(row + j), top);
    const float before = f->top[i], now = fmaxf(before, max_lanes(top));
    if (now == -INFINITY) { /* nothing to see, or nothing but NaN */
      for (I j = 0; j < t->m; j++)
        if (row[j] != row[j]) f->total[i] = NAN;
      memset(p, 0, 4 * TILE);
      continue;
    }
    if (c->dropout > 0) {
      const Drop drop = drop_row(c, t, i);
      for (I j = 0; j < t->m; j += VL) {
        const vec x = exp_(get(row + j) - now);
        sum += x;
        put(p + j, x * kept(drop, t->j0 + j));
      }
    } else
      for (I j = 0; j < t->m; j += VL) {
        const vec x = exp_(get(row + j) - now);
        sum += x;
        put(p + j, x);
      }
    clear_after(p, t->m);
    if (before != now) {
      const float shrink = expf(before - now);
      f->total[i] *= shrink;
      for (I x = 0; x < dvp; x += VL) put(f->out + i * dvp + x, get(f->out + i * dvp + x) * shrink);
    }
    f->top[i] = now;
    f->total[i] += sum_lanes(sum);
  }
}

static void forward_rows(const Call *c, I b, I h, I i0, Forward *f, Tables *tables) {
  const I dp = DP(c), dvp = DVP(c), n = least(TILE, c->lq - i0);
  float *s = INSIDE(f->s), *weights = INSIDE(f->weights);
  read_rows(&c->q, c->bf16, b, h, i0, n, c->d, dp, f->q);
  if (c->raw) read_rows(&c->raw_q, c->bf16, b, h, i0, n, c->d, dp, f->raw_q);
  if (tables->query_rows) far_products(c, n, dp, f->raw_q, tables->query_rows, f->far_q[0], f->far_q[1]);
  memset(f->out, 0, (size_t)(4 * TILE * dvp));
  for (I i = 0; i < n; i++) f->top[i] = -INFINITY, f->total[i] = 0;
  for (I j0 = 0; j0 < c->lk; j0 += TILE) {
    const Tile t = look(c, b, h, i0, j0, f->q_spans, f->k_spans);
    if (t.kind == SKIP) continue;
    const Operands o = {f->q, f->raw_q, f->k_panels + j0 * c->d, f->k + j0 * dp, f->raw_k + j0 * dp,
                        {f->far_q[0], f->far_q[1]}, {f->far_k[0] + j0, f->far_k[1] + j0},
                        tables, INSIDE(f->turned), f->scaled};
    logits(c, &t, &o, s, NULL);
    add_to_softmax(c, &t, f, s, weights);
    product(n, dvp / NR, t.m, weights, LD, 1, f->v + j0 * dvp, dvp, NR, f->out, dvp, 1);
    if (!tables->value_rows) continue;
    if (t.kind == BAND)
      spread_band(n, t.m, dvp, weights, LD, 1, tables->value_rows, t.e, 1, f->out);
    else if (t.kind == FAR)
      for (I i = 0; i < n; i++) {
        vec sum = {0};
        for (I j = 0; j < t.m; j += VL) sum += get(weights + i * LD + j);
        add_scaled(dvp, sum_lanes(sum), tables->value_rows + t.e * dvp, f->out + i * dvp);
      }
    else
      for (I i = 0; i < n; i++)
        for (I j = 0; j < t.m; j++)
          add_scaled(dvp, weights[i * LD + j], tables->value_rows + column(c, &t, i, j) * dvp, f->out + i * dvp);
  }
  for (I i = 0; i < n; i++) {
    const float total = f->total[i];
    const int nothing = total == 0;
    for (I x = 0; x < dvp; x++) f->out[i * dvp + x] = nothing ? 0 : f->out[i * dvp + x] / total;
    float *lse = c->lse + ((b * c->heads + h) * c->lq + i0 + i) * 2;
    lse[0] = nothing ? INFINITY : f->top[i], lse[1] = nothing ? 0 : logf(total);
  }
  write_rows(&c->out, 0, b, h, i0, n, c->dv, dvp, f->out);
}

/* 0, or 1 if there is not enough memory */
int locant_forward(const Call *c) {
  const I blocks = (c->lq + TILE - 1) / TILE, tasks = c->batch * c->heads * blocks, threads = thread_count(c, tasks);
  float *table_memory = NULL, *memory = NULL;
  Tables *tables = make_tables(c, 0, &table_memory);
  Arena size = {0};
  Forward once;
  take_forward(c, &size, &once);
  if (tables) memory = zeros(size.used * threads);
  if (!memory) {
    if (tables) free(table_memory);
    free(tables);
    return 1;
  }
#pragma omp parallel num_threads(threads)
  {
    const I thread = thread_number(), team = team_size();
    Arena arena = {memory + thread * size.used, 0};
    Forward f;
    take_forward(c, &arena, &f);
    I head = -1;
    for (I task = tasks * thread / team; task < tasks * (thread + 1) / team; task++) {
      const I bh = task / blocks, b = bh / c->heads, h = bh % c->heads, kv = h / (c->heads / c->kv_heads);
      if (bh != head) {
        const I same_keys = head >= 0 && head / c->heads == b && head % c->heads / (c->heads / c->kv_heads) == kv;
        if (!same_keys) {
          read_rows(&c->k, c->bf16, b, kv, 0, c->lk, c->d, DP(c), f.k);
          if (c->raw) read_rows(&c->raw_k, c->bf16, b, kv, 0, c->lk, c->d, DP(c), f.raw_k);
          read_rows(&c->v, c->bf16, b, kv, 0, c->lk, c->dv, DVP(c), f.v);
          into_panels(c->lk, c->d, DP(c), f.k, f.k_panels);
          find_spans(c->q_pos + b * c->q_pos_stride, c->lq, f.q_spans);
          find_spans(c->k_pos + b * c->k_pos_stride, c->lk, f.k_spans);
        }
        if (c->key) far_products(c, c->lk, DP(c), f.raw_k, tables[h].key_rows, f.far_k[0], f.far_k[1]);
        head = bh;
      }
      forward_rows(c, b, h, task % blocks * TILE, &f, tables + h);
    }
  }
  free(memory);
  free(table_memory);
  free(tables);
  return 0;
}

/* ---------------------------------------------------------------- backward */

typedef struct {
  float *bias, *gain, *query, *key, *value; /* over EXT columns, vectors in rows */
} TableGradients;

static void take_table_gradients(const Call *c, Arena *arena, TableGradients *g) {
  memset(g, 0, sizeof *g);
  if (c->dbias) g->bias = take(arena, EXT(c));
  if (c->dgain) g->gain = take(arena, EXT(c) * (c->gain_vector ? DP(c) : 1));
  if (c->dquery) g->query = take(arena, EXT(c) * DP(c));
  if (c->dkey) g->key = take(arena, EXT(c) * DP(c));
  if (c->dvalue) g->value = take(arena, EXT(c) * DVP(c));
}

typedef struct {
  float *k, *raw_k, *k_panels, *v_panels, *dk, *draw_k, *dv, *far_k[2];           /* of a key/value head */
  float *q, *raw_q, *grad, *dq, *draw_q, *delta, *lse, *far_q[2], *far_grad[2];   /* of a query head */
  float *s, *content, *weights, *change, *turned, *scaled, *rows;                  /* tiles */
  float *far_sum; /* a row of a table */
  TableGradients head; /* of one head; then added to the thread's */
  Tally tally;
  Span *q_spans, *k_spans;
} Backward;

static void take_backward(const Call *c, Arena *arena, Backward *w) {
  const I dp = DP(c), dvp = DVP(c), keys = KEYS(c), queries = QUERIES(c) + MR;
  memset(w, 0, sizeof *w);
  w->k = take(arena, keys * dp), w->dk = take(arena, keys * dp);
  w->raw_k = c->raw ? take(arena, keys * dp) : w->k;
  w->draw_k = c->raw ? take(arena, keys * dp) : w->dk;
  w->k_panels = take(arena, keys * c->d);
  w->v_panels = take(arena, keys * c->dv);
  w->dv = take(arena, keys * dvp);
  w->q = take(arena, queries * dp), w->dq = take(arena, queries * dp);
  w->raw_q = c->raw ? take(arena, queries * dp) : w->q;
  w->draw_q = c->raw ? take(arena, queries * dp) : w->dq;
  w->grad = take(arena, queries * dvp);
  w->delta = take(arena, queries), w->lse = take(arena, 2 * queries);
  for (int end = 0; end < 2; end++) {
    w->far_k[end] = take(arena, keys);
    w->far_q[end] = take(arena, queries);
    w->far_grad[end] = take(arena, queries);
  }
  w->s = take(arena, CELLS), w->content = take(arena, CELLS), w->turned = take(arena, CELLS);
  w->weights = take(arena, CELLS), w->change = take(arena, CELLS);
  w->scaled = take(arena, (TILE + MR) * dp);
  w->rows = take(arena, TILE * most(dp, dvp));
  w->far_sum = take(arena, most(dp, dvp));
  take_table_gradients(c, arena, &w->head);
  w->tally.total = take(arena, EXT(c));
  w->tally.touched = (I *)take(arena, 2 * TILE);
  w->q_spans = (Span *)take(arena, (I)(sizeof(Span) / 4) * (QUERIES(c) / TILE));
  w->k_spans = (Span *)take(arena, (I)(sizeof(Span) / 4) * (KEYS(c) / TILE));
}

/* Into `change`, the gradient of every logit; into `weights`, the weights (after dropout). Both zero around the tile. */
static void logit_gradients(const Call *c, const Tile *t, Backward *w, Tables *tables, const float *s) {
  const I dvp = DVP(c), n = t->n, m = t->m;
  float *weights = INSIDE(w->weights), *change = INSIDE(w->change), *pull = INSIDE(w->turned);
  const float *grad = w->grad + t->i0 * dvp;
  product(n, up(m, NR) / NR, c->dv, grad, dvp, 1, w->v_panels + t->j0 * c->dv, NR, c->dv * NR, pull, LD, 0);
  if (tables->value_rows && t->kind == BAND) add_band(n, m, c->dv, grad, dvp, tables->value_panels, t->e, pull);
  if (tables->value_rows && t->kind == SCATTER)
    for (I i = 0; i < n; i++)
      for (I j = 0; j < m; j++)
        pull[i * LD + j] += dot(dvp, grad + i * dvp, tables->value_rows + column(c, t, i, j) * dvp);
  for (I i = 0; i < n; i++) {
    const float top = w->lse[2 * (t->i0 + i)], rest = w->lse[2 * (t->i0 + i) + 1];
    const float far = tables->value_rows && t->kind == FAR ? w->far_grad[t->end][t->i0 + i] : 0;
    const float delta = w->delta[t->i0 + i];
    const float *row = s + i * LD, *g = pull + i * LD;
    float *p = weights + i * LD, *ds = change + i * LD;
    if (c->dropout > 0) {
      const Drop drop = drop_row(c, t, i);
      for (I j = 0; j < m; j += VL) {
        const vec x = exp_(get(row + j) - top - rest), keep = kept(drop, t->j0 + j);
        put(p + j, x * keep);
        put(ds + j, x * ((get(g + j) + far) * keep - delta));
      }
    } else
      for (I j = 0; j < m; j += VL) {
        const vec x = exp_(get(row + j) - top - rest);
        put(p + j, x);
        put(ds + j, x * (get(g + j) + far - delta));
      }
    clear_after(p, m);
    clear_after(ds, m);
  }
  for (I i = n; i < least(n + MR, TILE); i++) { /* the rows below, which a shifted product reads */
    memset(weights + i * LD, 0, 4 * TILE);
    memset(change + i * LD, 0, 4 * TILE);
  }
}

/* table[column of the pair] += W · x_i, by rows of W; by columns, with x_j, if the strides are exchanged */
static void collect_scattered(const Call *c, const Tile *t, Backward *w, const float *tile, I row, I col, I n, I m, I dp,
                              const float *x, float *table) {
  for (I i = 0; i < n; i++) {
    for (I j = 0; j < m; j++) {
      const I e = row == LD ? column(c, t, i, j) : column(c, t, j, i);
      tally(&w->tally, e, tile[i * row + j * col]);
    }
    for (I y = 0; y < w->tally.count; y++) {
      const I e = w->tally.touched[y];
      add_scaled(dp, w->tally.total[e], x + i * dp, table + e * dp);
    }
    forget(&w->tally);
  }
}

/* Of the values: what they and their table get */
static void value_gradients(const Call *c, const Tile *t, Backward *w, TableGradients *g) {
  const I dvp = DVP(c), n = t->n, m = t->m;
  const float *weights = INSIDE(w->weights), *grad = w->grad + t->i0 * dvp;
  product(m, dvp / NR, n, weights, 1, LD, grad, dvp, NR, w->dv + t->j0 * dvp, dvp, 1);
  if (!g->value) return;
  if (t->kind == BAND)
    collect_band(n, m, dvp, weights, LD, 1, grad, t->e, 1, g->value);
  else if (t->kind == SCATTER)
    collect_scattered(c, t, w, weights, LD, 1, n, m, dvp, grad, g->value);
  else {
    memset(w->far_sum, 0, (size_t)(4 * dvp));
    for (I i = 0; i < n; i++) {
      vec sum = {0};
      for (I j = 0; j < m; j += VL) sum += get(weights + i * LD + j);
      add_scaled(dvp, sum_lanes(sum), grad + i * dvp, w->far_sum);
    }
    add_scaled(dvp, 1, w->far_sum, g->value + t->e * dvp);
  }
}

/* table[column of the pair] += change, the whole tile */
static void collect_scalars(const Call *c, const Tile *t, Backward *w, const float *change, float *table) {
  vec sum = {0};
  for (I i = 0; i < t->n; i++) {
    const float *row = change + i * LD;
    if (t->kind == BAND) {
      float *to = table + t->e - i;
      for (I j = 0; j < t->m; j += VL) put(to + j, get(to + j) + get(row + j));
    } else if (t->kind == FAR)
      for (I j = 0; j < t->m; j += VL) sum += get(row + j);
    else {
      for (I j = 0; j < t->m; j++) tally(&w->tally, column(c, t, i, j), row[j]);
      for (I y = 0; y < w->tally.count; y++) table[w->tally.touched[y]] += w->tally.total[w->tally.touched[y]];
      forget(&w->tally);
    }
  }
  if (t->kind == FAR) table[t->e] += sum_lanes(sum);
}

/* Of the content product under a vector gain */
static void vector_gain_gradients(const Call *c, const Tile *t, Backward *w, Tables *tables, TableGradients *g) {
  const I dp = DP(c), n = t->n, m = t->m;
  const float *change = INSIDE(w->change), *q = w->q + t->i0 * dp, *k = w->k + t->j0 * dp;
  float *dq = w->dq + t->i0 * dp, *dk = w->dk + t->j0 * dp;
  if (t->kind == FAR) { /* one column: as without a gain, with q times that column */
    const float *gain = tables->gain_rows + t->e * dp;
    product(n, dp / NR, m, change, LD, 1, k, dp, NR, w->rows, dp, 0);
    memset(w->far_sum, 0, (size_t)(4 * dp));
    for (I i = 0; i < n; i++)
      for (I x = 0; x < dp; x += VL) {
        const I at = i * dp + x;
        put(dq + at, get(dq + at) + get(w->rows + at) * get(gain + x));
        put(w->far_sum + x, get(w->far_sum + x) + get(w->rows + at) * get(q + at));
        put(w->scaled + at, get(q + at) * get(gain + x));
      }
    if (g->gain) add_scaled(dp, 1, w->far_sum, g->gain + t->e * dp);
    product(m, dp / NR, n, change, 1, LD, w->scaled, dp, NR, dk, dp, 1);
    return;
  }
  for (I i = 0; i < n; i++)
    for (I j = 0; j < m; j++) {
      const float x = change[i * LD + j];
      if (x == 0) continue;
      const I e = (t->kind == BAND ? t->e + j - i : column(c, t, i, j)) * dp;
      const float *gain = tables->gain_rows + e;
      for (I y = 0; y < dp; y += VL) {
        const vec qq = x * get(q + i * dp + y), kk = get(k + j * dp + y), gg = get(gain + y);
        put(dq + i * dp + y, get(dq + i * dp + y) + x * kk * gg);
        put(dk + j * dp + y, get(dk + j * dp + y) + qq * gg);
        if (g->gain) put(g->gain + e + y, get(g->gain + e + y) + qq * kk);
      }
    }
}

/* Of p_i·query_r + t_j·key_r */
static void vector_term_gradients(const Call *c, const Tile *t, Backward *w, Tables *tables, TableGradients *g) {
  const I dp = DP(c), n = t->n, m = t->m;
  const float *change = INSIDE(w->change), *q = w->raw_q + t->i0 * dp, *k = w->raw_k + t->j0 * dp;
  float *dq = w->draw_q + t->i0 * dp, *dk = w->draw_k + t->j0 * dp;
  const float *query = tables->query_rows, *key = tables->key_rows;
  if (t->kind == BAND) {
    if (query) spread_band(n, m, dp, change, LD, 1, query, t->e, 1, dq);
    if (g->query) collect_band(n, m, dp, change, LD, 1, q, t->e, 1, g->query);
    if (key) spread_band(m, n, dp, change, 1, LD, key, t->e, -1, dk);
    if (g->key) collect_band(m, n, dp, change, 1, LD, k, t->e, -1, g->key);
  } else if (t->kind == FAR) {
    vec columns[TILE / VL] = {{0}};
    memset(w->far_sum, 0, (size_t)(4 * dp));
    for (I i = 0; i < n; i++) {
      vec sum = {0};
      for (I j = 0; j < TILE; j += VL) sum += get(change + i * LD + j), columns[j / VL] += get(change + i * LD + j);
      const float x = sum_lanes(sum);
      if (query) add_scaled(dp, x, query + t->e * dp, dq + i * dp);
      if (g->query) add_scaled(dp, x, q + i * dp, w->far_sum);
    }
    if (g->query) add_scaled(dp, 1, w->far_sum, g->query + t->e * dp);
    memset(w->far_sum, 0, (size_t)(4 * dp));
    for (I j = 0; j < m; j++) {
      const float x = columns[j / VL][j % VL];
      if (key) add_scaled(dp, x, key + t->e * dp, dk + j * dp);
      if (g->key) add_scaled(dp, x, k + j * dp, w->far_sum);
    }
    if (g->key) add_scaled(dp, 1, w->far_sum, g->key + t->e * dp);
  } else {
    for (I i = 0; i < n; i++)
      for (I j = 0; j < m; j++) {
        const float x = change[i * LD + j];
        const I e = column(c, t, i, j) * dp;
        if (query) add_scaled(dp, x, query + e, dq + i * dp);
        if (key) add_scaled(dp, x, key + e, dk + j * dp);
      }
    if (g->query) collect_scattered(c, t, w, change, LD, 1, n, m, dp, q, g->query);
    if (g->key) collect_scattered(c, t, w, change, 1, LD, m, n, dp, k, g->key);
  }
}

static void backward_tile(const Call *c, const Tile *t, Backward *w, Tables *tables, TableGradients *g) {
  const I dp = DP(c), n = t->n, m = t->m, i0 = t->i0, j0 = t->j0;
  float *s = INSIDE(w->s), *content = tables->gain ? INSIDE(w->content) : NULL, *change = INSIDE(w->change);
  const Operands o = {w->q + i0 * dp, w->raw_q + i0 * dp, w->k_panels + j0 * c->d, w->k + j0 * dp, w->raw_k + j0 * dp,
                      {w->far_q[0] + i0, w->far_q[1] + i0}, {w->far_k[0] + j0, w->far_k[1] + j0},
                      tables, INSIDE(w->turned), w->scaled};
  logits(c, t, &o, s, content);
  logit_gradients(c, t, w, tables, s);
  value_gradients(c, t, w, g);
  if (g->bias) collect_scalars(c, t, w, change, g->bias);
  const float scale = (float)c->scale;
  for (I i = 0; i < n; i++)
    for (I j = 0; j < m; j += VL) put(change + i * LD + j, get(change + i * LD + j) * scale);
  if (tables->query_rows || tables->key_rows) vector_term_gradients(c, t, w, tables, g);
  if (tables->gain_rows) {
    vector_gain_gradients(c, t, w, tables, g);
    return;
  }
  if (content) {
    if (g->gain) {
      for (I i = 0; i < n; i++) {
        for (I j = 0; j < m; j += VL) put(content + i * LD + j, get(content + i * LD + j) * get(change + i * LD + j));
        clear_after(content + i * LD, m);
      }
      collect_scalars(c, t, w, content, g->gain);
    }
    for (I i = 0; i < n; i++)
      for (I j = 0; j < m; j += VL) {
        vec x;
        if (t->kind == BAND) x = get(tables->gain + t->e + j - i);
        else if (t->kind == FAR) x = all(tables->gain[t->e]);
        else for (int l = 0; l < VL; l++) x[l] = j + l < m ? tables->gain[column(c, t, i, j + l)] : 0;
        put(change + i * LD + j, get(change + i * LD + j) * x);
      }
  }
  product(n, dp / NR, m, change, LD, 1, w->k + j0 * dp, dp, NR, w->dq + i0 * dp, dp, 1);
  product(m, dp / NR, n, change, 1, LD, w->q + i0 * dp, dp, NR, w->dk + j0 * dp, dp, 1);
}

static void backward_head(const Call *c, I b, I h, Backward *w, Tables *tables, TableGradients *g) {
  const I dp = DP(c), dvp = DVP(c), lq = c->lq;
  read_rows(&c->q, c->bf16, b, h, 0, lq, c->d, dp, w->q);
  if (c->raw) read_rows(&c->raw_q, c->bf16, b, h, 0, lq, c->d, dp, w->raw_q);
  read_rows(&c->grad, 0, b, h, 0, lq, c->dv, dvp, w->grad);
  memcpy(w->lse, c->lse + (b * c->heads + h) * lq * 2, (size_t)(8 * lq));
  for (I i = 0; i < lq; i++) { /* Σ_j weight · gradient of the weight = gradient · output */
    read_rows(&c->out, 0, b, h, i, 1, c->dv, dvp, w->rows);
    float sum = 0;
    for (I x = 0; x < c->dv; x++) sum += w->rows[x] * w->grad[i * dvp + x];
    w->delta[i] = sum;
  }
  memset(w->dq, 0, (size_t)(4 * lq * dp));
  if (c->raw) memset(w->draw_q, 0, (size_t)(4 * lq * dp));
  if (c->query) far_products(c, lq, dp, w->raw_q, tables->query_rows, w->far_q[0], w->far_q[1]);
  if (c->key) far_products(c, c->lk, dp, w->raw_k, tables->key_rows, w->far_k[0], w->far_k[1]);
  if (c->value) far_products(c, lq, dvp, w->grad, tables->value_rows, w->far_grad[0], w->far_grad[1]);
  for (I j0 = 0; j0 < c->lk; j0 += TILE)
    for (I i0 = 0; i0 < lq; i0 += TILE) {
      const Tile t = look(c, b, h, i0, j0, w->q_spans, w->k_spans);
      if (t.kind != SKIP) backward_tile(c, &t, w, tables, g);
    }
  write_rows(&c->dq, c->bf16, b, h, 0, lq, c->d, dp, w->dq);
  if (c->raw) write_rows(&c->draw_q, c->bf16, b, h, 0, lq, c->d, dp, w->draw_q);
}

/* Adds n numbers to others and leaves zeros */
static void pour(float *from, float *to, I n) {
  if (!from) return;
  add_scaled(n, 1, from, to);
  memset(from, 0, (size_t)(4 * n));
}

/* Adds one thread's gradients of a head's tables to the result, columns beyond the ends to the last one */
static void fold(const Call *c, const float *from, I d, I dp, float *to) {
  if (!from) return;
  for (I e = 0; e < EXT(c); e++) {
    const I column = most(0, least(e - PAD, c->columns - 1));
    for (I k = 0; k < d; k++) to[column * d + k] += from[e * dp + k];
  }
}

/* 0, or 1 if there is not enough memory */
int locant_backward(const Call *c) {
  const I tasks = c->batch * c->kv_heads, threads = thread_count(c, tasks), group = c->heads / c->kv_heads;
  float *table_memory = NULL, *memory = NULL, *gradient_memory = NULL;
  Tables *tables = make_tables(c, 1, &table_memory);
  Arena size = {0}, gradient_size = {0};
  Backward once;
  TableGradients none;
  take_backward(c, &size, &once);
  take_table_gradients(c, &gradient_size, &none);
  int own = 0;
  if (most(most(c->bias_heads, c->gain_heads), most(c->query_heads, most(c->key_heads, c->value_heads))) > 1) own = 1;
  if (tables) memory = zeros(size.used * threads);
  if (!memory) {
    if (tables) free(table_memory);
    free(tables);
    return 1;
  }
  I team = 1, heads = 1;
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    {
      team = team_size();
      /* Tasks go by key/value head, then by batch: a thread meets few heads, and needs tables for those alone. */
      if (own) heads = least(c->kv_heads, (tasks + team - 1) / team / c->batch + 2) * group;
      gradient_memory = zeros(gradient_size.used * heads * team + 1);
    }
    const I thread = thread_number(), from = tasks * thread / team;
    const I to = gradient_memory ? tasks * (thread + 1) / team : from;
    Arena arena = {memory + thread * size.used, 0};
    Backward w;
    take_backward(c, &arena, &w);
    for (I task = from; task < to; task++) {
      const I kv = task / c->batch, b = task % c->batch;
      read_rows(&c->k, c->bf16, b, kv, 0, c->lk, c->d, DP(c), w.k);
      if (c->raw) read_rows(&c->raw_k, c->bf16, b, kv, 0, c->lk, c->d, DP(c), w.raw_k);
      into_panels(c->lk, c->d, DP(c), w.k, w.k_panels);
      read_rows(&c->v, c->bf16, b, kv, 0, c->lk, c->dv, DVP(c), w.dv); /* dv is free until here */
      into_panels(c->lk, c->dv, DVP(c), w.dv, w.v_panels);
      find_spans(c->q_pos + b * c->q_pos_stride, c->lq, w.q_spans);
      find_spans(c->k_pos + b * c->k_pos_stride, c->lk, w.k_spans);
      memset(w.dv, 0, (size_t)(4 * c->lk * DVP(c)));
      memset(w.dk, 0, (size_t)(4 * c->lk * DP(c)));
      if (c->raw) memset(w.draw_k, 0, (size_t)(4 * c->lk * DP(c)));
      for (I h = kv * group; h < (kv + 1) * group; h++) {
        const I slot = own ? h - from / c->batch * group : 0;
        Arena mine = {gradient_memory + (thread * heads + slot) * gradient_size.used, 0};
        TableGradients g;
        take_table_gradients(c, &mine, &g);
        backward_head(c, b, h, &w, tables + h, &w.head);
        pour(w.head.bias, g.bias, EXT(c));
        pour(w.head.gain, g.gain, EXT(c) * (c->gain_vector ? DP(c) : 1));
        pour(w.head.query, g.query, EXT(c) * DP(c));
        pour(w.head.key, g.key, EXT(c) * DP(c));
        pour(w.head.value, g.value, EXT(c) * DVP(c));
      }
      write_rows(&c->dk, c->bf16, b, kv, 0, c->lk, c->d, DP(c), w.dk);
      if (c->raw) write_rows(&c->draw_k, c->bf16, b, kv, 0, c->lk, c->d, DP(c), w.draw_k);
      write_rows(&c->dv_, c->bf16, b, kv, 0, c->lk, c->dv, DVP(c), w.dv);
    }
  }
  for (I thread = 0; gradient_memory && thread < team; thread++) { /* in the same order every time */
    const I first = tasks * thread / team / c->batch * group;
    for (I slot = 0; slot < heads; slot++) {
      const I h = first + slot;
      if (h >= c->heads) break;
      Arena mine = {gradient_memory + (thread * heads + slot) * gradient_size.used, 0};
      TableGradients g;
      take_table_gradients(c, &mine, &g);
#define TO(name, size) (c->d##name + (c->name##_heads == 1 ? 0 : h) * c->columns * (size))
      if (g.bias) fold(c, g.bias, 1, 1, TO(bias, 1));
      if (g.gain && !c->gain_vector) fold(c, g.gain, 1, 1, TO(gain, 1));
      if (g.gain && c->gain_vector) fold(c, g.gain, c->d, DP(c), TO(gain, c->d));
      if (g.query) fold(c, g.query, c->d, DP(c), TO(query, c->d));
      if (g.key) fold(c, g.key, c->d, DP(c), TO(key, c->d));
      if (g.value) fold(c, g.value, c->dv, DVP(c), TO(value, c->dv));
#undef TO
    }
  }
  const int failed = !gradient_memory;
  free(gradient_memory);
  free(memory);
  free(table_memory);
  free(tables);
  return failed;
}
