// An agent of the AI SDK: node agent.mjs BASE_URL MODEL QUESTION generate|stream chat|responses|messages
// It writes one line of JSON: its answer, and the cities that its tool was asked for. See ../test_agents.py.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenResponses } from '@ai-sdk/open-responses';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [baseURL, model, prompt, how, dialect] = process.argv.slice(2);
const degrees = { Rome: 21, Oslo: 4 };
const cities = [];
const weather = tool({
  description: 'Tells the weather of a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    cities.push(city);
    return `${city} has ${degrees[city]} degrees.`;
  },
});
const named = { name: 'baton', baseURL, apiKey: 'none' };
const providers = {
  chat: () => createOpenAICompatible({ ...named, includeUsage: true }),
  responses: () => createOpenResponses({ ...named, url: `${baseURL}/responses` }),
  messages: () => createAnthropic(named),
};
const baton = providers[dialect]();
const given = { model: baton(model), prompt, tools: { weather }, stopWhen: stepCountIs(5), maxRetries: 0 };
const result = how === 'stream' ? streamText(given) : await generateText(given);
console.log(JSON.stringify({ text: await result.text, cities }));
