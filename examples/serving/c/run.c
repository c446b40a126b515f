/* Asks an exported language model through TensorFlow's C API, without Python.

       run MODEL/VERSION TEXT ID ID ...

   Prints a line per answer: the log-probabilities after each token by `serving_default`, then by
   a `step` for each token, that of TEXT, and what the model says of a wrong request. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tensorflow/c/c_api.h>

#define MOST 64 /* inputs or outputs of an endpoint */
typedef struct { const char *operation; int index; } Place;
typedef struct { int num_inputs, num_outputs; Place inputs[MOST], outputs[MOST]; } Endpoint;
#include "endpoints.h" /* written by endpoints.py, for one version of a model */

static TF_Graph *graph;
static TF_Session *session;
static TF_Status *status;
static TF_Tensor *inputs[MOST], *outputs[MOST];

static void must_be_ok(void) {
  if (TF_GetCode(status) == TF_OK) return;
  fprintf(stderr, "%s\n", TF_Message(status));
  exit(1);
}

static void ask(const Endpoint *endpoint) { /* reads `inputs`, sets `outputs` and `status` */
  TF_Output from[MOST], to[MOST];
  const Place *in = endpoint->inputs, *out = endpoint->outputs;
  int num_in = endpoint->num_inputs, num_out = endpoint->num_outputs;
  for (int i = 0; i < num_in; i++)
    from[i] = (TF_Output){TF_GraphOperationByName(graph, in[i].operation), in[i].index};
  for (int i = 0; i < num_out; i++)
    to[i] = (TF_Output){TF_GraphOperationByName(graph, out[i].operation), out[i].index};
  TF_SessionRun(session, NULL, from, inputs, num_in, to, outputs, num_out, NULL, 0, NULL, status);
}

static TF_Tensor *integers(const int *values, int rank, const int64_t *shape, int count) {
  TF_Tensor *tensor = TF_AllocateTensor(TF_INT32, shape, rank, count * sizeof(int));
  return memcpy(TF_TensorData(tensor), values, count * sizeof(int)), tensor;
}

static TF_Tensor *string(const char *text) {
  TF_Tensor *tensor = TF_AllocateTensor(TF_STRING, (int64_t[]){1}, 1, sizeof(TF_TString));
  TF_StringInit(TF_TensorData(tensor));
  return TF_StringCopy(TF_TensorData(tensor), text, strlen(text)), tensor;
}

static void print(const char *name, const float *numbers, int64_t count) {
  printf("%s", name);
  for (int64_t i = 0; i < count; i++) printf(" %.9g", numbers[i]);
  printf("\n");
}

int main(int argc, char **argv) {
  if (argc < 4) return fprintf(stderr, "usage: run MODEL/VERSION TEXT ID ID ...\n"), 2;
  int length = argc - 3, one_row = 1, wrong_id = -1, ids[length];
  for (int i = 0; i < length; i++) ids[i] = atoi(argv[i + 3]);
  status = TF_NewStatus(), graph = TF_NewGraph();
  const char *tags[] = {"serve"};
  session = TF_LoadSessionFromSavedModel(TF_NewSessionOptions(), NULL, argv[1], tags, 1, graph,
                                         NULL, status);
  must_be_ok();

  inputs[0] = integers(ids, 2, (int64_t[]){1, length}, length);
  ask(&serving_default), must_be_ok();
  int64_t size = TF_Dim(outputs[0], 2); /* of the vocabulary */
  for (int i = 0; i < length; i++)
    print("serving_default", (float *)TF_TensorData(outputs[0]) + i * size, size);

  inputs[0] = integers(&one_row, 0, NULL, 1);
  ask(&initial_cache), must_be_ok();
  memcpy(inputs + 1, outputs, initial_cache.num_outputs * sizeof *inputs);
  for (int i = 0; i < length; i++) {
    inputs[0] = integers(ids + i, 1, (int64_t[]){1}, 1);
    ask(&step), must_be_ok();
    print("step", TF_TensorData(outputs[0]), size);
    for (int j = 0; j < step.num_inputs; j++) TF_DeleteTensor(inputs[j]);
    memcpy(inputs + 1, outputs + 1, (step.num_outputs - 1) * sizeof *inputs); /* the cache */
  }

  inputs[0] = string(argv[2]);
  ask(&score_text), must_be_ok();
  print("score_text", TF_TensorData(outputs[0]), 1);

  inputs[0] = integers(&wrong_id, 2, (int64_t[]){1, 1}, 1);
  ask(&serving_default);
  printf("refused %d %s\n", TF_GetCode(status), TF_Message(status));
}
