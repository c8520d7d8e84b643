/* A library that stands in for libnccl where there is no GPU: memory is the host's, and threads
 * of this library stand in for the device's queues. Ranks may be threads or processes: data goes
 * through pipes in shared memory.
 *
 * It is as strict as NCCL is unforgiving. Calls return at once and go on in the background, also
 * the first operation on a communicator; a call meanwhile, or from another thread, is an error.
 * Sums take f32 only, and run in an order of their own. Ranks that call different operations hang,
 * and ranks that make groups of different ones.
 * On queues that keep one order, a rank's operations of all communicators run one after the other
 * as they were issued, and a message is sent once it has been received: the strictest that NCCL
 * may be, so ranks that issue their common operations in different orders hang, too.
 * Built with other values of VERSION, or with NO_SEND, it is an old or an incomplete library. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 22703
#endif
/* A driver that has this file within it (ci/cuda-on-cpu) may delay what a queue does next, and
 * refuse memory that is not of the queue's device. */
#ifndef BEFORE_EACH
#define BEFORE_EACH(stream) ((void)0)
#define MAY_TOUCH(stream, at, bytes, write) ((void)(bytes), 1)
#endif

enum { Success, CudaError, SystemError, InternalError, InvalidArgument, InvalidUsage, RemoteError,
       InProgress };

static void nap(long us) {
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

/* Of those that wait for others, who may be many: the longer it has taken, the longer. */
enum { FIRST_NAP_US = 20 };
static void nap_longer(long *us) {
    nap(*us);
    if (*us < 500) *us *= 2;
}

/* --- Queues and events ----------------------------------------------------------------------- */

typedef struct { atomic_int done, owners; } Event;
typedef struct Item { void (*run)(void *); void *arg; struct Item *next; } Item;
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t bell;
    Item *first, *last;
    int closed;
    atomic_int one_order;
    atomic_int fail; /* result that the next operation on this queue ends with */
} Stream;

static void *serve(void *arg) {
    Stream *s = arg;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        while (!s->first && !s->closed) pthread_cond_wait(&s->bell, &s->lock);
        Item *item = s->first;
        if (item && !(s->first = item->next)) s->last = NULL;
        pthread_mutex_unlock(&s->lock);
        if (!item) break;
        BEFORE_EACH(s);
        item->run(item->arg);
        free(item);
    }
    free(s);
    return NULL;
}

static void enqueue(Stream *s, void (*run)(void *), void *arg) {
    Item *item = malloc(sizeof *item);
    *item = (Item){run, arg, NULL};
    pthread_mutex_lock(&s->lock);
    if (s->last) s->last->next = item; else s->first = item;
    s->last = item;
    pthread_cond_signal(&s->bell);
    pthread_mutex_unlock(&s->lock);
}

Stream *pretendStream(void) {
    Stream *s = calloc(1, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->bell, NULL);
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, s)) abort();
    pthread_detach(thread);
    return s;
}

void pretendStreamFree(Stream *s) {
    pthread_mutex_lock(&s->lock);
    s->closed = 1;
    pthread_cond_signal(&s->bell);
    pthread_mutex_unlock(&s->lock);
}

void pretendStreamOneOrder(Stream *s) { atomic_store(&s->one_order, 1); }
void pretendStreamFail(Stream *s, int result) { atomic_store(&s->fail, result); }

static void disown(Event *e) { if (atomic_fetch_sub(&e->owners, 1) == 1) free(e); }
static void reach(void *arg) {
    Event *e = arg;
    atomic_store(&e->done, 1);
    syscall(SYS_futex, &e->done, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    disown(e);
}
void pretendJoin(Event *e) {
    while (!atomic_load(&e->done))
        syscall(SYS_futex, &e->done, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
}
static void await(void *arg) { Event *e = arg; pretendJoin(e); disown(e); }

Event *pretendRecord(Stream *s) {
    Event *e = malloc(sizeof *e);
    atomic_init(&e->done, 0);
    atomic_init(&e->owners, 2);
    enqueue(s, reach, e);
    return e;
}

Event *pretendShare(Event *e) { atomic_fetch_add(&e->owners, 1); return e; }
void pretendWait(Stream *s, Event *e) { enqueue(s, await, pretendShare(e)); }
int pretendIsDone(Event *e) { return atomic_load(&e->done); }
void pretendEventFree(Event *e) { disown(e); }

typedef struct { void *to, *from; size_t bytes; long us; } Copy;
static void copy(void *arg) {
    Copy *c = arg;
    nap(c->us);
    memcpy(c->to, c->from, c->bytes);
    free(c->from);
    free(c);
}

/* Work that takes a while: until then `to` holds bytes of ones, then again what it holds now. */
void pretendLateWork(Stream *s, void *to, size_t bytes, long us) {
    Copy *c = malloc(sizeof *c);
    *c = (Copy){to, malloc(bytes), bytes, us};
    memcpy(c->from, to, bytes);
    memset(to, 0xff, bytes);
    enqueue(s, copy, c);
}

/* --- Communicators ---------------------------------------------------------------------------- */

#define PIPE (16 << 10)
typedef struct { _Atomic uint64_t head, tail; char data[PIPE]; } Pipe;
typedef struct { atomic_int joined; Pipe pipes[]; } Shared;
typedef struct { char internal[128]; } Id;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cluster, ctas_min, ctas_max;
} Config;

typedef struct Comm {
    Shared *shared;
    int rank, size;
    char name[64];
    pthread_t owner;
    atomic_int state, abort, running, connected;
} Comm;

static Pipe *pipe_to(Comm *c, int from, int to) { return &c->shared->pipes[from * c->size + to]; }

int ncclGetVersion(int *version) { *version = VERSION; return Success; }
const char *ncclGetErrorString(int result) {
    static const char *words[] = {"no error", "unhandled cuda error", "unhandled system error",
        "internal error", "invalid argument", "invalid usage", "remote process exited",
        "in progress"};
    return result >= 0 && result <= InProgress ? words[result] : "unknown result code";
}
const char *ncclGetLastError(Comm *c) { (void)c; return "the pretended library's last words"; }

int ncclGetUniqueId(Id *id) {
    static atomic_int count;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/pretend-nccl-%d-%d-%ld", getpid(),
             atomic_fetch_add(&count, 1), now.tv_nsec);
    return Success;
}

static void *meet(void *arg) {
    Comm *c = arg;
    size_t bytes = sizeof(Shared) + sizeof(Pipe) * c->size * c->size;
    int file = shm_open(c->name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, bytes)) { atomic_store(&c->state, SystemError); return NULL; }
    c->shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (atomic_fetch_add(&c->shared->joined, 1) + 1 == c->size) shm_unlink(c->name);
    while (atomic_load(&c->shared->joined) < c->size && !atomic_load(&c->abort)) nap(50);
    if (atomic_load(&c->abort)) shm_unlink(c->name);
    atomic_store(&c->state, Success);
    return NULL;
}

/* The limit of thread blocks that the last communicator of so many ranks was started with. */
static atomic_int ctas_max[64];
int pretendCtasMax(int size) { return atomic_load(&ctas_max[size]); }

int ncclCommInitRankConfig(Comm **out, int size, Id id, int rank, Config *config) {
    if (!config || config->magic != 0xcafebeef || config->size < 20 || config->blocking != 0)
        return InvalidArgument;
    if (rank < 0 || rank >= size) return InvalidArgument;
    int newer = config->size >= sizeof *config && config->version >= 21700;
    if (size < 64) atomic_store(&ctas_max[size], newer ? config->ctas_max : INT_MIN);
    Comm *c = calloc(1, sizeof *c);
    c->rank = rank;
    c->size = size;
    memcpy(c->name, id.internal, sizeof c->name - 1);
    c->owner = pthread_self();
    atomic_store(&c->state, InProgress);
    *out = c;
    pthread_t thread;
    if (pthread_create(&thread, NULL, meet, c)) return SystemError;
    pthread_detach(thread);
    return InProgress;
}

int ncclCommGetAsyncError(Comm *c, int *state) { *state = atomic_load(&c->state); return Success; }
int ncclCommFinalize(Comm *c) {
    if (atomic_load(&c->state)) return InvalidUsage;
    return atomic_load(&c->running) ? InvalidUsage : Success;
}
/* Handles are never freed, so that a use after this is seen and not a crash. */
int ncclCommDestroy(Comm *c) {
    if (atomic_exchange(&c->abort, 1)) return InvalidUsage;
    return Success;
}
int ncclCommAbort(Comm *c) {
    atomic_store(&c->abort, 1);
    shm_unlink(c->name);
    while (atomic_load(&c->running)) nap(50);
    return Success;
}

/* --- Operations ------------------------------------------------------------------------------- */

enum { AllGather, ReduceScatter, AllReduce, Broadcast, Send, Recv };

/* The operations of one rank, which one thread issues: tickets, and whose turn it is. */
typedef struct { uint64_t issued; _Atomic uint64_t turn; } Order;
static _Thread_local Order *own_order;

typedef struct {
    Comm *comm;
    Stream *stream;
    int kind, type, peer;
    const char *from;
    char *to;
    size_t count;
    Order *order; /* NULL on queues that keep no order */
    uint64_t ticket;
    int place, of; /* in its group */
} Op;
typedef struct { int64_t kind, type, peer; uint64_t count; int32_t place, of; } Head;

/* One direction of a transfer: a head, then the bytes. */
typedef struct { Pipe *pipe; Head head; char *data; size_t bytes, moved; int heads; } Part;

static int put(Part *p) {
    uint64_t head = atomic_load(&p->pipe->head), tail = atomic_load(&p->pipe->tail);
    size_t room = PIPE - (head - tail), n = sizeof p->head + p->bytes - p->moved;
    if (n > room) n = room;
    for (size_t i = 0; i < n; i++, p->moved++) {
        size_t at = p->moved;
        char byte = at < sizeof p->head ? ((char *)&p->head)[at] : p->data[at - sizeof p->head];
        p->pipe->data[(head + i) % PIPE] = byte;
    }
    atomic_store(&p->pipe->head, head + n);
    return p->moved == sizeof p->head + p->bytes;
}

static int get(Part *p, Head *seen) {
    uint64_t head = atomic_load(&p->pipe->head), tail = atomic_load(&p->pipe->tail);
    size_t n = head - tail, i = 0;
    for (; i < n && p->moved < sizeof *seen + p->bytes; i++, p->moved++) {
        char byte = p->pipe->data[(tail + i) % PIPE];
        if (p->moved < sizeof *seen) ((char *)seen)[p->moved] = byte;
        else p->data[p->moved - sizeof *seen] = byte;
        /* Another operation on the other side: nothing fits, nothing goes on. */
        if (p->moved + 1 == sizeof *seen && memcmp(seen, &p->head, sizeof *seen)) return 0;
    }
    if (p->moved >= sizeof *seen && memcmp(seen, &p->head, sizeof *seen)) return 0;
    atomic_store(&p->pipe->tail, tail + i);
    return p->moved == sizeof *seen + p->bytes;
}

static int exchange(Comm *c, Part *out, int outs, Part *in, int ins) {
    char done_out[64] = {0}, done_in[64] = {0};
    Head seen[64];
    long pause = FIRST_NAP_US;
    for (int left = outs + ins; left;) {
        int before = left;
        uint64_t moved = 0;
        for (int i = 0; i < outs; i++)
            if (!done_out[i]) {
                moved -= out[i].moved;
                left -= done_out[i] = put(&out[i]);
                moved += out[i].moved;
            }
        for (int i = 0; i < ins; i++)
            if (!done_in[i]) {
                moved -= in[i].moved;
                left -= done_in[i] = get(&in[i], &seen[i]);
                moved += in[i].moved;
            }
        if (atomic_load(&c->abort)) return 0;
        if (left == before && !moved) nap_longer(&pause); else pause = FIRST_NAP_US;
    }
    return 1;
}

static size_t width(int type) { return type == 7 ? 4 : 1; }

static void run(Op *op) {
    Comm *c = op->comm;
    int n = c->size, me = c->rank;
    size_t bytes = op->count * width(op->type);
    Part out[64], in[64];
    int outs = 0, ins = 0;
    Head head = {op->kind, op->type, op->kind == Broadcast ? op->peer : 0, op->count, op->place,
                 op->of};
    char *space = NULL;
#define OUT(rank, address, size) \
    out[outs++] = (Part){pipe_to(c, me, rank), head, (char *)(address), size, 0, 0}
#define IN(rank, address, size) \
    in[ins++] = (Part){pipe_to(c, rank, me), head, (char *)(address), size, 0, 0}
    switch (op->kind) {
    case AllGather:
        memmove(op->to + me * bytes, op->from, bytes);
        for (int r = 0; r < n; r++) if (r != me) {
            OUT(r, op->from, bytes);
            IN(r, op->to + r * bytes, bytes);
        }
        exchange(c, out, outs, in, ins);
        break;
    case ReduceScatter:
    case AllReduce: {
        int whole = op->kind == AllReduce;
        space = malloc(bytes * n);
        memcpy(space + me * bytes, op->from + (whole ? 0 : me * bytes), bytes);
        for (int r = 0; r < n; r++) if (r != me) {
            OUT(r, op->from + (whole ? 0 : r * bytes), bytes);
            IN(r, space + r * bytes, bytes);
        }
        if (!exchange(c, out, outs, in, ins)) break;
        /* The order of a ring that ends at the owner of the part; of all ranks, backwards. */
        float *to = (float *)op->to;
        for (size_t i = 0; i < op->count; i++) {
            float sum = 0;
            for (int k = 1; k <= n; k++) {
                int r = whole ? n - k : (me + k) % n;
                float x = ((float *)(space + r * bytes))[i];
                sum = k == 1 ? x : sum + x;
            }
            to[i] = sum;
        }
        break;
    }
    case Broadcast:
        if (me == op->peer) {
            if (op->to != op->from) memmove(op->to, op->from, bytes);
            for (int r = 0; r < n; r++) if (r != me) OUT(r, op->from, bytes);
        } else IN(op->peer, op->to, bytes);
        exchange(c, out, outs, in, ins);
        break;
    case Send:
        head.kind = Send;
        OUT(op->peer, op->from, bytes);
        exchange(c, out, outs, in, ins);
        Pipe *sent = out[0].pipe;
        for (long pause = FIRST_NAP_US; op->order && !atomic_load(&c->abort)
             && atomic_load(&sent->tail) < atomic_load(&sent->head);) nap_longer(&pause);
        break;
    case Recv:
        head.kind = Send;
        IN(op->peer, op->to, bytes);
        exchange(c, out, outs, in, ins);
        break;
    }
    free(space);
}

static int may_run(Op *op) {
    Comm *c = op->comm;
    size_t bytes = op->count * width(op->type), all = bytes * c->size;
    int root = op->kind != Broadcast || c->rank == op->peer, reads = op->kind != Recv && root;
    return (!reads || MAY_TOUCH(op->stream, op->from, op->kind == ReduceScatter ? all : bytes, 0))
        && (op->kind == Send
            || MAY_TOUCH(op->stream, op->to, op->kind == AllGather ? all : bytes, 1));
}

static void perform(void *arg) {
    Op *op = arg;
    Order *order = op->order;
    for (long pause = FIRST_NAP_US; order && atomic_load(&order->turn) != op->ticket
         && !atomic_load(&op->comm->abort);) nap_longer(&pause);
    if (!may_run(op)) atomic_store(&op->comm->state, CudaError);
    else if (!atomic_load(&op->comm->abort)) run(op);
    if (order && atomic_load(&order->turn) == op->ticket)
        atomic_store(&order->turn, op->ticket + 1);
    atomic_fetch_sub(&op->comm->running, 1);
    free(op);
}

/* The operations of one call, all of one communicator. */
typedef struct { int count; Op *ops[256]; } Call;

static void *connect_first(void *arg) {
    Call *call = arg;
    Comm *c = call->ops[0]->comm;
    nap(1000);
    for (int i = 0; i < call->count; i++) enqueue(call->ops[i]->stream, perform, call->ops[i]);
    free(call);
    atomic_store(&c->state, Success);
    return NULL;
}

/* Calls so far in which a communicator of so many ranks took part. */
static atomic_int calls[64];
int pretendCalls(int size) { return atomic_load(&calls[size]); }

static int begin(Call *call) {
    Comm *c = call->ops[0]->comm;
    if (c->size < 64) atomic_fetch_add(&calls[c->size], 1);
    for (int i = 0; i < call->count; i++) {
        Op *op = call->ops[i];
        op->place = i;
        op->of = call->count;
        atomic_fetch_add(&c->running, 1);
        int fail = atomic_exchange(&op->stream->fail, 0);
        if (fail) {
            /* The operation never ends by itself, and the communicator says why. */
            atomic_store(&c->state, fail);
            atomic_fetch_sub(&c->running, i + 1);
            return Success;
        }
        if (!atomic_load(&op->stream->one_order)) continue;
        /* Never freed: the rank's thread may end before its last operation. */
        if (!own_order) own_order = calloc(1, sizeof *own_order);
        op->order = own_order;
        op->ticket = own_order->issued++;
    }
    if (atomic_exchange(&c->connected, 1)) {
        for (int i = 0; i < call->count; i++) enqueue(call->ops[i]->stream, perform, call->ops[i]);
        free(call);
        return Success;
    }
    atomic_store(&c->state, InProgress);
    pthread_t thread;
    if (pthread_create(&thread, NULL, connect_first, call)) return SystemError;
    pthread_detach(thread);
    return InProgress;
}

static _Thread_local Call *group; /* between start and end */

static int start(Op given) {
    Comm *c = given.comm;
    if (atomic_load(&c->abort) || !pthread_equal(c->owner, pthread_self())) return InvalidUsage;
    if (atomic_load(&c->state)) return InvalidUsage;
    if (given.peer < 0 || given.peer >= c->size || !given.stream) return InvalidArgument;
    int sums = given.kind == ReduceScatter || given.kind == AllReduce;
    if (sums ? given.type != 7 : given.type != 1) return InvalidArgument;
    Call *call = group ? group : calloc(1, sizeof *call);
    /* NCCL takes groups of several communicators, which nobody makes here. */
    if (call->count == 256 || (call->count && call->ops[0]->comm != c)) return InvalidUsage;
    Op *op = malloc(sizeof *op);
    *op = given;
    call->ops[call->count++] = op;
    return group ? Success : begin(call);
}

int ncclGroupStart(void) {
    if (group) return InvalidUsage;
    group = calloc(1, sizeof *group);
    return Success;
}

int ncclGroupEnd(void) {
    Call *call = group;
    group = NULL;
    if (!call) return InvalidUsage;
    if (call->count) return begin(call);
    free(call);
    return Success;
}

int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *c, Stream *s) {
    return start((Op){c, s, AllGather, type, 0, from, to, count, NULL, 0, 0, 1});
}
int ncclReduceScatter(
    const void *from, void *to, size_t count, int type, int op, Comm *c, Stream *s
) {
    if (op) return InvalidArgument;
    return start((Op){c, s, ReduceScatter, type, 0, from, to, count, NULL, 0, 0, 1});
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *c, Stream *s) {
    if (op) return InvalidArgument;
    return start((Op){c, s, AllReduce, type, 0, from, to, count, NULL, 0, 0, 1});
}
int ncclBroadcast(
    const void *from, void *to, size_t count, int type, int root, Comm *c, Stream *s
) {
    return start((Op){c, s, Broadcast, type, root, from, to, count, NULL, 0, 0, 1});
}
#ifndef NO_SEND
int ncclSend(const void *from, size_t count, int type, int peer, Comm *c, Stream *s) {
    return start((Op){c, s, Send, type, peer, from, NULL, count, NULL, 0, 0, 1});
}
#endif
int ncclRecv(void *to, size_t count, int type, int peer, Comm *c, Stream *s) {
    return start((Op){c, s, Recv, type, peer, NULL, to, count, NULL, 0, 0, 1});
}
