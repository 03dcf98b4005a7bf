// Streams one completion from Baton and prints each event as a line of JSON; the messages are generated from
// proto/generation.proto (`npm run generate -- PATH/TO/generation.proto`).
// Usage: node client.js HOST:PORT PROMPT MAX_OUTPUT_TOKENS
'use strict';

const grpc = require('@grpc/grpc-js');
const { baton } = require('./generated/generation');

const { GenerateStreamRequest, GenerateStreamResponse, FinishReason } = baton.v1;

const GenerationClient = grpc.makeGenericClientConstructor(
  {
    generateStream: {
      path: '/baton.v1.GenerationService/GenerateStream',
      requestStream: false,
      responseStream: true,
      requestSerialize: (message) => Buffer.from(GenerateStreamRequest.encode(message).finish()),
      requestDeserialize: (bytes) => GenerateStreamRequest.decode(bytes),
      responseSerialize: (message) => Buffer.from(GenerateStreamResponse.encode(message).finish()),
      responseDeserialize: (bytes) => GenerateStreamResponse.decode(bytes),
    },
  },
  'GenerationService',
);

function show(event) {
  switch (event.event) {
    case 'started':
      return { started: { model: event.started.model, promptTokens: event.started.promptTokens } };
    case 'delta': {
      const { firstTokenIndex, tokenIds, text } = event.delta;
      return { delta: { firstTokenIndex, tokenIds, text } };
    }
    case 'sequenceEnd': {
      const { finishReason, tokenCount } = event.sequenceEnd;
      return { sequenceEnd: { finishReason: FinishReason[finishReason], tokenCount } };
    }
    case 'completed':
      return { completed: { completionTokens: event.completed.usage.completionTokens } };
    default:
      return { [event.event]: {} };
  }
}

function main([address, prompt, maxOutputTokens]) {
  const client = new GenerationClient(address, grpc.credentials.createInsecure());
  const call = client.generateStream({
    spec: {
      text: prompt,
      sampling: { temperature: 0 },
      stopping: { maxOutputTokens: Number(maxOutputTokens), ignoreEos: true },
      output: { tokenIds: true },
    },
  });
  call.on('data', (event) => console.log(JSON.stringify(show(event))));
  call.on('error', (error) => {
    console.log(JSON.stringify({ error: { code: grpc.status[error.code], details: error.details } }));
    process.exitCode = 1;
    client.close();
  });
  call.on('end', () => client.close());
}

main(process.argv.slice(2));
