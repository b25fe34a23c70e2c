/* Random calls of the kernel in src/locant/attention/fused.c, built with sanitizers: every tensor is a block of exactly
   its own size, with random strides, and results are compared with loops over pairs in double precision.

   cc -fsanitize=address,undefined … fused_fuzz.c && ./a.out SEED CALLS */

#include FUSED
#include <stdio.h>

static uint64_t state;
static uint32_t random_bits(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 33);
}
static Int between(Int a, Int b) { return a + random_bits() % (b - a + 1); }
static float random_real(void) { return (float)random_bits() / 1073741824.0f - 1; }

/* [n0, n1, n2, n3] in a random order of dimensions, sometimes with gaps */
static View random_tensor(Int n0, Int n1, Int n2, Int n3, int bf16, float **start) {
  const Int n[4] = {n0, n1, n2, n3};
  int order[4] = {0, 1, 2, 3};
  for (int i = 3; i > 0; i--) {
    int j = (int)between(0, i), t = order[i];
    order[i] = order[j], order[j] = t;
  }
  View v;
  Int size = 1, last = 0;
  for (int i = 3; i >= 0; i--) {
    v.stride[order[i]] = size;
    last += (n[order[i]] - 1) * size;
    size *= n[order[i]] + between(0, 1);
  }
  v.data = malloc((size_t)((last + 1) * (bf16 ? 2 : 4)));
  for (Int i = 0; i <= last; i++) write_value(v.data, i, bf16, random_real());
  *start = v.data;
  return v;
}
static double element(const View *v, int bf16, Int a, Int b, Int c, Int d) {
  return read_value(v->data, a * v->stride[0] + b * v->stride[1] + c * v->stride[2] + d * v->stride[3], bf16);
}
static float *random_table(Int n, float around) {
  float *t = malloc((size_t)(4 * n));
  for (Int i = 0; i < n; i++) t[i] = around + 0.5f * random_real();
  return t;
}

static double worst;
static void compare(double got, double expected, double tolerance, const char *what) {
  const double error = fabs(got - expected) / tolerance;
  if (!(error <= 1)) {
    printf("%s: got %.9g, expected %.9g\n", what, got, expected);
    exit(1);
  }
  if (error > worst) worst = error;
}

static const Int sizes[] = {1, 2, 7, 31, 64, 127, 128, 129, 200, 257, 300};

static void one_call(void) {
  Call c = {0};
  const int bf16 = random_bits() % 4 == 0;
  c.batch = between(1, 2), c.kv_heads = between(1, 2), c.heads = c.kv_heads * between(1, 2);
  c.queries = sizes[random_bits() % 11], c.keys = sizes[random_bits() % 11];
  c.head_dim = between(1, 40), c.value_dim = between(1, 40);
  c.causal = random_bits() % 2, c.bf16 = bf16, c.threads = between(1, 3), c.scale = random_real() * 0.5;
  float *blocks[32];
  int n = 0;
  c.has_raw = random_bits() % 2;
  c.q = random_tensor(c.batch, c.heads, c.queries, c.head_dim, bf16, &blocks[n++]);
  c.k = random_tensor(c.batch, c.kv_heads, c.keys, c.head_dim, bf16, &blocks[n++]);
  c.v = random_tensor(c.batch, c.kv_heads, c.keys, c.value_dim, bf16, &blocks[n++]);
  c.raw_q = c.has_raw ? random_tensor(c.batch, c.heads, c.queries, c.head_dim, bf16, &blocks[n++]) : c.q;
  c.raw_k = c.has_raw ? random_tensor(c.batch, c.kv_heads, c.keys, c.head_dim, bf16, &blocks[n++]) : c.k;
  c.out = random_tensor(c.batch, c.heads, c.queries, c.value_dim, 0, &blocks[n++]);
  c.grad = random_tensor(c.batch, c.heads, c.queries, c.value_dim, 0, &blocks[n++]);
  c.dq = random_tensor(c.batch, c.heads, c.queries, c.head_dim, bf16, &blocks[n++]);
  c.dk = random_tensor(c.batch, c.kv_heads, c.keys, c.head_dim, bf16, &blocks[n++]);
  c.dv = random_tensor(c.batch, c.kv_heads, c.keys, c.value_dim, bf16, &blocks[n++]);
  c.draw_q = random_tensor(c.batch, c.heads, c.queries, c.head_dim, bf16, &blocks[n++]);
  c.draw_k = random_tensor(c.batch, c.kv_heads, c.keys, c.head_dim, bf16, &blocks[n++]);
  c.lse = random_table(2 * c.batch * c.heads * c.queries, 0), blocks[n++] = c.lse;
  /* positions: consecutive, with a jump back, or random */
  Int *q_pos = malloc((size_t)(8 * c.batch * c.queries)), *k_pos = malloc((size_t)(8 * c.batch * c.keys));
  const int pattern = (int)between(0, 2);
  for (Int b = 0; b < c.batch; b++) {
    const Int first = between(-5, 5), jump = between(0, c.keys);
    for (Int j = 0; j < c.keys; j++)
      k_pos[b * c.keys + j] = pattern == 2 ? between(-300, 300) : first + j - (pattern == 1 && j > jump ? jump : 0);
    for (Int i = 0; i < c.queries; i++)
      q_pos[b * c.queries + i] = pattern == 2 ? between(-300, 300) : first + i + c.keys - c.queries;
  }
  c.q_pos = q_pos, c.k_pos = k_pos, c.q_pos_stride = c.queries, c.k_pos_stride = c.keys;
  const Int clip = between(0, 1) ? between(0, 20) : 700;
  c.first_offset = -clip, c.columns = 2 * clip + 1;
#define TABLE(name, size, around, odds)                                                                                \
  c.name##_heads = between(0, 1) ? c.heads : 1;                                                                        \
  if (random_bits() % odds == 0) {                                                                                     \
    c.name = blocks[n++] = random_table(c.name##_heads * c.columns * (size), around);                                  \
    c.d##name = blocks[n++] = calloc((size_t)(c.name##_heads * c.columns * (size)), 4);                                \
  }
  TABLE(bias, 1, 0, 2)
  c.vector_gain = random_bits() % 2;
  TABLE(gain, (c.vector_gain ? c.head_dim : 1), 1, 3)
  TABLE(query, c.head_dim, 0, 2)
  TABLE(key, c.head_dim, 0, 2)
  TABLE(value, c.value_dim, 0, 2)
  uint8_t *mask = NULL;
  if (random_bits() % 2) {
    const Int mb = between(0, 1) ? c.batch : 1, mh = between(0, 1) ? c.heads : 1, mq = between(0, 1) ? c.queries : 1;
    mask = malloc((size_t)(mb * mh * mq * c.keys));
    const int dense = random_bits() % 2;
    for (Int i = 0; i < mb * mh * mq * c.keys; i++) mask[i] = dense ? random_bits() % 5 != 0 : random_bits() % 60 == 0;
    c.mask = (View){mask, {mb > 1 ? mh * mq * c.keys : 0, mh > 1 ? mq * c.keys : 0, mq > 1 ? c.keys : 0, 1}};
  }
  if (locant_forward(&c)) exit(2);

  /* the same by pairs */
  const Int group = c.heads / c.kv_heads;
  double *p = malloc((size_t)(8 * c.keys)), *o = malloc((size_t)(8 * c.value_dim));
  double *dq = calloc((size_t)(c.batch * c.heads * c.queries * c.head_dim), 8),
         *dk = calloc((size_t)(c.batch * c.kv_heads * c.keys * c.head_dim), 8);
  double *rq = calloc((size_t)(c.batch * c.heads * c.queries * c.head_dim), 8),
         *rk = calloc((size_t)(c.batch * c.kv_heads * c.keys * c.head_dim), 8);
  double *dv = calloc((size_t)(c.batch * c.kv_heads * c.keys * c.value_dim), 8);
  double *dbias = calloc((size_t)(c.heads * c.columns), 8),
         *dgain = calloc((size_t)(c.heads * c.columns * c.head_dim), 8);
  double *dquery = calloc((size_t)(c.heads * c.columns * c.head_dim), 8),
         *dkey = calloc((size_t)(c.heads * c.columns * c.head_dim), 8);
  double *dvalue = calloc((size_t)(c.heads * c.columns * c.value_dim), 8);
#define OF(name, size) ((c.name##_heads == 1 ? 0 : h) * c.columns + r) * (size)
  for (Int b = 0; b < c.batch; b++)
    for (Int h = 0; h < c.heads; h++)
      for (Int i = 0; i < c.queries; i++) {
        double top = -INFINITY, total = 0;
        const Int g = h / group;
#define COLUMN(j) max_of(0, min_of(k_pos[b * c.keys + (j)] - q_pos[b * c.queries + i] - c.first_offset, c.columns - 1))
#define SEEN(j)                                                                                                        \
  (!(c.causal && k_pos[b * c.keys + (j)] > q_pos[b * c.queries + i]) &&                                                \
   (!mask || mask[b * c.mask.stride[0] + h * c.mask.stride[1] + i * c.mask.stride[2] + (j)]))
        for (Int j = 0; j < c.keys; j++) {
          const Int r = COLUMN(j);
          double s = 0;
          for (Int x = 0; x < c.head_dim; x++) {
            double gain = !c.gain ? 1 : c.vector_gain ? c.gain[OF(gain, c.head_dim) + x] : c.gain[OF(gain, 1)];
            s += element(&c.q, bf16, b, h, i, x) * element(&c.k, bf16, b, g, j, x) * gain;
            if (c.query) s += element(&c.raw_q, bf16, b, h, i, x) * c.query[OF(query, c.head_dim) + x];
            if (c.key) s += element(&c.raw_k, bf16, b, g, j, x) * c.key[OF(key, c.head_dim) + x];
          }
          p[j] = SEEN(j) ? c.scale * s + (c.bias ? c.bias[OF(bias, 1)] : 0) : -INFINITY;
          if (p[j] > top) top = p[j];
        }
        for (Int j = 0; j < c.keys; j++) p[j] = top == -INFINITY ? 0 : exp(p[j] - top), total += p[j];
        memset(o, 0, (size_t)(8 * c.value_dim));
        for (Int j = 0; j < c.keys; j++) {
          const Int r = COLUMN(j);
          p[j] = total > 0 ? p[j] / total : 0;
          for (Int x = 0; x < c.value_dim; x++)
            o[x] += p[j] * (element(&c.v, bf16, b, g, j, x) + (c.value ? c.value[OF(value, c.value_dim) + x] : 0));
        }
        for (Int x = 0; x < c.value_dim; x++) compare(element(&c.out, 0, b, h, i, x), o[x], 2e-5, "out");
        double delta = 0;
        for (Int x = 0; x < c.value_dim; x++) delta += o[x] * element(&c.grad, 0, b, h, i, x);
        for (Int j = 0; j < c.keys; j++) {
          if (p[j] == 0) continue;
          const Int r = COLUMN(j);
          double dweight = 0;
          for (Int x = 0; x < c.value_dim; x++) {
            const double go = element(&c.grad, 0, b, h, i, x);
            dweight += go * (element(&c.v, bf16, b, g, j, x) + (c.value ? c.value[OF(value, c.value_dim) + x] : 0));
            dv[((b * c.kv_heads + g) * c.keys + j) * c.value_dim + x] += p[j] * go;
            if (c.value) dvalue[OF(value, c.value_dim) + x] += p[j] * go;
          }
          const double ds = p[j] * (dweight - delta), w = ds * c.scale;
          if (c.bias) dbias[OF(bias, 1)] += ds;
          for (Int x = 0; x < c.head_dim; x++) {
            const Int iq = ((b * c.heads + h) * c.queries + i) * c.head_dim + x,
                      ik = ((b * c.kv_heads + g) * c.keys + j) * c.head_dim + x;
            const double q = element(&c.q, bf16, b, h, i, x), k = element(&c.k, bf16, b, g, j, x);
            const double gain = !c.gain ? 1 : c.vector_gain ? c.gain[OF(gain, c.head_dim) + x] : c.gain[OF(gain, 1)];
            dq[iq] += w * k * gain, dk[ik] += w * q * gain;
            if (c.gain) dgain[c.vector_gain ? OF(gain, c.head_dim) + x : OF(gain, 1)] += w * q * k;
            if (c.query) {
              rq[iq] += w * c.query[OF(query, c.head_dim) + x];
              dquery[OF(query, c.head_dim) + x] += w * element(&c.raw_q, bf16, b, h, i, x);
            }
            if (c.key) {
              rk[ik] += w * c.key[OF(key, c.head_dim) + x];
              dkey[OF(key, c.head_dim) + x] += w * element(&c.raw_k, bf16, b, g, j, x);
            }
          }
        }
      }
  if (locant_backward(&c)) exit(2);
  const double tol = bf16 ? 3e-2 : 2e-3; /* gradients are rounded to bfloat16 */
  for (Int b = 0; b < c.batch; b++) {
    for (Int h = 0; h < c.heads; h++)
      for (Int i = 0; i < c.queries; i++)
        for (Int x = 0; x < c.head_dim; x++) {
          const Int iq = ((b * c.heads + h) * c.queries + i) * c.head_dim + x;
          compare(element(&c.dq, bf16, b, h, i, x), dq[iq] + (c.has_raw ? 0 : rq[iq]), tol, "dq");
          if (c.has_raw) compare(element(&c.draw_q, bf16, b, h, i, x), rq[iq], tol, "draw_q");
        }
    for (Int g = 0; g < c.kv_heads; g++)
      for (Int j = 0; j < c.keys; j++) {
        for (Int x = 0; x < c.head_dim; x++) {
          const Int ik = ((b * c.kv_heads + g) * c.keys + j) * c.head_dim + x;
          compare(element(&c.dk, bf16, b, g, j, x), dk[ik] + (c.has_raw ? 0 : rk[ik]), tol, "dk");
          if (c.has_raw) compare(element(&c.draw_k, bf16, b, g, j, x), rk[ik], tol, "draw_k");
        }
        for (Int x = 0; x < c.value_dim; x++)
          compare(element(&c.dv, bf16, b, g, j, x), dv[((b * c.kv_heads + g) * c.keys + j) * c.value_dim + x],
                  bf16 ? 3e-1 : 2e-3, "dv");
      }
  }
#define SAME(name, size)                                                                                               \
  if (c.name)                                                                                                          \
    for (Int i = 0; i < c.name##_heads * c.columns * (size); i++) compare(c.d##name[i], d##name[i], 1e-2, "d" #name);
  SAME(bias, 1)
  SAME(gain, (c.vector_gain ? c.head_dim : 1))
  SAME(query, c.head_dim)
  SAME(key, c.head_dim)
  SAME(value, c.value_dim)
  while (n) free(blocks[--n]);
  free(q_pos), free(k_pos), free(mask), free(p), free(o), free(dq), free(dk), free(rq), free(rk), free(dv);
  free(dbias), free(dgain), free(dquery), free(dkey), free(dvalue);
}

int main(int argc, char **argv) {
  if (argc != 3) return 3;
  state = (uint64_t)atoll(argv[1]) * 2654435761u + 1;
  for (int i = 0; i < atoi(argv[2]); i++) one_call();
  printf("%s calls, worst error %.2f of the tolerance\n", argv[2], worst);
  return 0;
}
